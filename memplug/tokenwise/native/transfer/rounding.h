// Rounding buffers: device memory, reserved once, into which tensors are prefetched (MEMO, section 4.1).
//
// The tensors of one frame share a buffer, and the frames take the buffers in turn. Each tensor has a storage of its
// own within its buffer. A tensor is alive until the last user of that storage, autograd or the script, is done.
// Another frame takes the buffer only once no tensor in it is alive. Nothing is moved or overwritten.
//
// All buffers belong to one stream, as memory of the caching allocator does. `record_stream` has no effect on their
// tensors. `Transfer::order_use` registers a reader on another stream; any other reader has to make the buffers'
// stream wait for the read.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "streams.h"
#include "tape.h"

namespace memplug {

// Guarded by Python's lock, except that tensors may die on any thread.
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

  // Records `reader` as a user of the buffers: once freed, their memory is reused only after the work that is queued on
  // `reader` by then.
  void use_on(Streams& streams, const StreamRef& reader) const;

  // Returns the bytes of all buffers.
  int64_t nbytes() const;

  const StreamRef stream;

 private:
  struct RoundingBuffer {
    at::Tensor memory;
    int64_t frame = -1; // number of the frame that uses it
    int64_t used_bytes = 0; // from the buffer's beginning; 0 again only after the last tensor
    std::atomic<int64_t> alive{0}; // number of tensors in it

    bool is_in_use() const {
      return alive.load(std::memory_order_acquire) > 0;
    }
    bool has_room(int64_t from, int64_t nbytes) const {
      return from + nbytes <= memory.numel();
    }
  };

  std::shared_ptr<RoundingBuffer> find(int64_t frame, int64_t nbytes) const;

  std::vector<std::shared_ptr<RoundingBuffer>> buffers_; // shared with the tensors in them
};

} // namespace memplug
