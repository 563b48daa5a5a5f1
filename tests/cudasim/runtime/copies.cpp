// Copies and fills, queued on their stream. As CUDA documents, a copy from pageable memory reads it before the call
// returns; a copy to pageable memory makes the host wait until the memory is written.
#include <cstring>

#include "memory.h"
#include "races.h"
#include "scheduler.h"

namespace cudasim {
namespace {

const double LINK_LATENCY_S = 3e-6, FILL_LATENCY_S = 2e-6;
const double DEVICE_COPY_BYTES_PER_S = 1.5e12, FILL_BYTES_PER_S = 2e12;

enum class Place { DEVICE, PINNED, PAGEABLE };

Place place_of(const void* pointer, size_t bytes) {
  return lies_in(state().device, pointer, bytes) ? Place::DEVICE
      : lies_in(state().pinned, pointer, bytes) ? Place::PINNED
                                                : Place::PAGEABLE;
}

bool is_said(cudaMemcpyKind kind, Place to, Place from) {
  if (kind == cudaMemcpyDefault) {
    return true;
  }
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return (to == Place::DEVICE) == to_device && (from == Place::DEVICE) == from_device;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Stream& stream, bool waits) {
  if (bytes == 0) {
    return cudaSuccess;
  }
  const Place target = place_of(to, bytes), source = place_of(from, bytes);
  if (!is_said(kind, target, source)) {
    violation("a copy's pointers are not what its kind says, or not of memory that is still there");
    return fail(cudaErrorInvalidValue);
  }
  Ranges ranges;
  if (target != Place::PAGEABLE) {
    ranges.push_back(range_of(to, bytes, true));
  }
  if (source != Place::PAGEABLE) {
    ranges.push_back(range_of(from, bytes, false));
  }
  std::function<void()> run = [=] { std::memmove(to, from, bytes); };
  const bool captured = stream.capture != nullptr;
  if (source == Place::PAGEABLE && !captured) {
    const auto* begin = static_cast<const char*>(from);
    const auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    run = [=] { std::memcpy(to, staged->data(), bytes); };
  }
  const bool link = target != Place::DEVICE || source != Place::DEVICE;
  const double rate = link ? settings().copy_bytes_per_s : DEVICE_COPY_BYTES_PER_S;
  const char* name = !link ? "memcpy D2D" : target == Place::DEVICE ? "memcpy H2D" : "memcpy D2H";
  const double seconds = LINK_LATENCY_S + static_cast<double>(bytes) / rate;
  const cudaError_t error = run_on(stream, name, seconds, std::move(ranges), std::move(run));
  if ((waits || target == Place::PAGEABLE) && !captured) {
    ++state().blocked;
    wait_for(stream);
  }
  return error;
}

} // namespace
} // namespace cudasim

using namespace cudasim;

CUDASIM_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                        cudaStream_t stream) {
  const Lock lock(state().mutex);
  return copy(to, from, bytes, kind, *stream_of(stream), false);
}

CUDASIM_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Lock lock(state().mutex);
  return copy(to, from, bytes, kind, *state().default_stream, true);
}

CUDASIM_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

CUDASIM_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                          size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch,
                                              static_cast<const char*>(from) + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaMemsetAsync(void* pointer, int byte, size_t bytes, cudaStream_t stream) {
  const Lock lock(state().mutex);
  if (!lies_in(state().device, pointer, bytes)) {
    violation("cudaMemset of what is not device memory");
    return fail(cudaErrorInvalidValue);
  }
  const double seconds = FILL_LATENCY_S + static_cast<double>(bytes) / FILL_BYTES_PER_S;
  return run_on(*stream_of(stream), "memset", seconds, {range_of(pointer, bytes, true)},
                [=] { std::memset(pointer, byte, bytes); });
}

CUDASIM_API cudaError_t cudaMemset(void* pointer, int byte, size_t bytes) {
  return cudaMemsetAsync(pointer, byte, bytes, nullptr);
}
