// Rounding buffers: device memory that tensors are prefetched into, reserved once (MEMO, section 4.1).
//
// The tensors of one frame share a buffer, and the frames take the buffers in turn. Each tensor has a storage of its own
// in its buffer: when that goes, at the last of its users, be it autograd or a person, its bytes are given back, and a
// buffer is another frame's only once no tensor is alive in it. Nothing is ever moved, or overwritten.
//
// All of it belongs to one stream, as memory of the caching allocator does. `record_stream` on such a tensor does
// nothing: a reader on another stream is known by `Transfer::order_use`, or has to let this one wait for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "streams.h"
#include "tape.h"

namespace memplug {

// Guarded by Python's lock, but for tensors, which may die on any thread.
class RoundingBuffers {
 public:
  // Throws where the device has no room for `count` buffers of `nbytes`.
  RoundingBuffers(Streams& streams, const StreamRef& stream, size_t count, int64_t nbytes);

  // Whether a tensor of the frame of that number would find room now.
  bool has_room(int64_t frame, int64_t nbytes) const {
    return find(frame, nbytes) != nullptr;
  }

  // A tensor of the frame, with contents of no meaning; undefined where there is no room.
  at::Tensor take(int64_t frame, const Geometry& geometry, int64_t nbytes);

  // Their memory, once it is freed, is reused only after the work queued on this stream then.
  void use_on(Streams& streams, const StreamRef& reader) const;

  // Of all buffers.
  int64_t nbytes() const;

  const StreamRef stream;

 private:
  struct Buffer {
    at::Tensor memory;
    int64_t frame = -1; // that it is of, while it is in use
    int64_t used_bytes = 0; // from its beginning, whether or not their tensors are alive
    std::atomic<int64_t> alive{0}; // tensors in it

    bool is_in_use() const {
      return alive.load(std::memory_order_acquire) > 0;
    }
    bool has_room(int64_t from, int64_t nbytes) const {
      return from + nbytes <= memory.numel();
    }
  };

  std::shared_ptr<Buffer> find(int64_t frame, int64_t nbytes) const;

  std::vector<std::shared_ptr<Buffer>> buffers_; // tensors keep theirs
};

} // namespace memplug
