// Rounding buffers: device memory, reserved once, into which memplug prefetches tensors (MEMO, section 4.1).
//
// The tensors of one frame share a buffer, and frames take the buffers in turn. Each tensor has a storage of its own
// within its buffer, and is alive until autograd and the script have dropped that storage. Another frame gets the
// buffer only when no tensor in it is alive, so nothing is moved or overwritten.
//
// All buffers belong to one stream, as a block of the caching allocator does. `record_stream` has no effect on tensors
// in them. A reader on another stream has to go through `Transfer::order_use`, or make the buffers' stream wait for the
// read.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "streams.h"
#include "tape.h"

namespace memplug {

// The rounding buffers of one executor. Guarded by Python's lock, except that tensors may die on any thread.
class RoundingBuffers {
 public:
  // Throws if the device has no room for `count` buffers of `nbytes`.
  RoundingBuffers(Streams& streams, const StreamRef& stream, size_t count, int64_t nbytes);

  // Returns whether a tensor of frame number `frame` would find room now.
  bool has_room(int64_t frame, int64_t nbytes) const {
    return find(frame, nbytes) != nullptr;
  }

  // Returns an uninitialized tensor for the frame; undefined if there is no room.
  at::Tensor take(int64_t frame, const Geometry& geometry, int64_t nbytes);

  // Records `reader` as a user of the buffers with the allocator. Once the buffers are freed, the allocator reuses
  // their memory only after the work that was queued on `reader` at that time.
  void use_on(Streams& streams, const StreamRef& reader) const;

  // Returns the bytes of all buffers together.
  int64_t nbytes() const;

  const StreamRef stream;

 private:
  struct RoundingBuffer {
    at::Tensor memory;
    int64_t frame = -1; // number of the frame that uses the buffer
    int64_t used_bytes = 0; // bytes in use from the buffer's start; set back to 0 only after the last tensor has died
    std::atomic<int64_t> alive{0}; // number of living tensors in the buffer

    bool is_in_use() const {
      return alive.load(std::memory_order_acquire) > 0;
    }
    bool has_room(int64_t from, int64_t nbytes) const {
      return from + nbytes <= memory.numel();
    }
  };

  std::shared_ptr<RoundingBuffer> find(int64_t frame, int64_t nbytes) const;

  std::vector<std::shared_ptr<RoundingBuffer>> buffers_; // a buffer lives as long as a tensor in it
};

} // namespace memplug
