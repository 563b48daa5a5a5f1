#include "rounding.h"

#include <ATen/ops/from_blob.h>

#include "blocks.h"

namespace memplug {

RoundingBuffers::RoundingBuffers(Streams& streams, const StreamRef& stream, size_t count, int64_t nbytes)
    : stream(stream) {
  for (size_t i = 0; i < count; ++i) {
    buffers_.push_back(std::make_shared<RoundingBuffer>());
    buffers_.back()->memory = streams.empty(stream, {in_blocks(nbytes)}, {1}, at::kByte);
  }
}

// Returns the buffer that the frame already uses, if it has room. Otherwise returns the first free buffer with room,
// beginning with the buffer whose turn it is; null if there is none.
std::shared_ptr<RoundingBuffers::RoundingBuffer> RoundingBuffers::find(int64_t frame, int64_t nbytes) const {
  for (const auto& buffer : buffers_) {
    if (buffer->frame == frame && buffer->is_in_use() && buffer->has_room(buffer->used_bytes, nbytes)) {
      return buffer;
    }
  }
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const auto& buffer = buffers_[(static_cast<size_t>(frame) + i) % buffers_.size()];
    if (!buffer->is_in_use() && buffer->has_room(0, nbytes)) {
      return buffer;
    }
  }
  return nullptr;
}

at::Tensor RoundingBuffers::take(int64_t frame, const Geometry& geometry, int64_t nbytes) {
  const auto buffer = find(frame, nbytes);
  if (buffer == nullptr) {
    return {};
  }
  if (!buffer->is_in_use()) {
    buffer->frame = frame;
    buffer->used_bytes = 0;
  }
  auto* const begin = static_cast<char*>(buffer->memory.mutable_data_ptr()) + buffer->used_bytes;
  buffer->used_bytes += in_blocks(nbytes);
  buffer->alive.fetch_add(1, std::memory_order_relaxed);
  const auto give_back = [](void* context) {
    auto* const holder = static_cast<std::shared_ptr<RoundingBuffer>*>(context);
    (*holder)->alive.fetch_sub(1, std::memory_order_release);
    delete holder;
  };
  return at::for_blob(begin, geometry.size)
      .strides(geometry.stride)
      .context(new std::shared_ptr<RoundingBuffer>(buffer), give_back)
      .options(buffer->memory.options().dtype(geometry.dtype))
      .target_device(buffer->memory.device())
      .make_tensor();
}

void RoundingBuffers::use_on(Streams& streams, const StreamRef& reader) const {
  for (const auto& buffer : buffers_) {
    streams.use_on(reader, buffer->memory);
  }
}

int64_t RoundingBuffers::nbytes() const {
  int64_t total = 0;
  for (const auto& buffer : buffers_) {
    total += buffer->memory.numel();
  }
  return total;
}

} // namespace memplug
