// What the CUDA allocator has in use, by its own trace, and with the arena's together.
#pragma once

#ifdef MEMPLUG_CUDA

#include <cstddef>
#include <cstdint>

#include "requests.h"

#ifndef MEMPLUG_WITHOUT_CUDA_ARENA
#define MEMPLUG_CUDA_ARENA // this version of torch has an allocator that can be stood in front of
#endif

namespace c10::cuda::CUDACachingAllocator {
class CUDAAllocator;
}

namespace memplug {

constexpr size_t AGGREGATE = 0, LARGE_POOL = 2; // as in torch's StatType

struct DeviceBytes {
  int64_t requested; // as asked for
  int64_t allocated; // as rounded up
};

// Count from here on; the device's allocator has so much in use now, and had so much at most, without the arena's.
void begin_device_peak(int device, DeviceBytes in_use, DeviceBytes peak);

// The most of the allocator's blocks and the arena's together since it was reset.
DeviceBytes device_peak();
void reset_device_peak();

// The arena's blocks have changed.
void note_arena_use(int64_t live_bytes, int64_t live_size);

// While one lives, requests of the calling thread are not recorded.
struct Unheard {
  Unheard();
  ~Unheard();
};

// What stands in front of the device's allocator, made and not put there yet; throws where this version of torch has
// calls that are not known. Then `stand_before_cuda` puts it there and takes it off again: once it has no user, as soon as
// there is no memory of an arena any more, since `record_stream` of its blocks is nothing that the native allocator listens to.
void prepare_cuda_allocator(int device);
void stand_before_cuda(User user, bool on);
void note_arena_memory(int parts); // that are reserved now
c10::cuda::CUDACachingAllocator::CUDAAllocator& native_cuda_allocator();

} // namespace memplug

#endif
