// Bytes in use of the CUDA allocator, counted by its own trace, and together with the arena's.
#pragma once

#ifdef MEMPLUG_CUDA

#include <cstddef>
#include <cstdint>

#include "requests.h"

#ifndef MEMPLUG_WITHOUT_CUDA_ARENA
#define MEMPLUG_CUDA_ARENA // memplug can stand in front of the allocator of this version of torch
#endif

namespace c10::cuda::CUDACachingAllocator {
class CUDAAllocator;
}

namespace memplug {

constexpr size_t AGGREGATE = 0, LARGE_POOL = 2; // indices in torch's StatType

struct DeviceBytes {
  int64_t requested; // as requested
  int64_t allocated; // rounded up
};

// Starts counting from the allocator's current bytes in use and its peak so far, both without the arena's.
void begin_device_peak(int device, DeviceBytes in_use, DeviceBytes peak);

// Returns the peak of the allocator's blocks and the arena's together since the last reset.
DeviceBytes device_peak();
void reset_device_peak();

// Reports the arena's bytes in use, as requested and rounded up.
void note_arena_use(int64_t live_bytes, int64_t live_size);

// While one lives, requests of the calling thread are not recorded.
struct Unheard {
  Unheard();
  ~Unheard();
};

// Makes the allocator that stands in front of the device's, without installing it; throws if this version of torch has
// calls that are not known. `stand_before_cuda` installs it and removes it. Without a user it stays until no arena has
// memory any more, because `record_stream` of arena blocks must not reach the native allocator, which would ignore it.
void prepare_cuda_allocator(int device);
void stand_before_cuda(User user, bool on);
void note_arena_memory(int parts); // number of pieces that are reserved now
c10::cuda::CUDACachingAllocator::CUDAAllocator& native_cuda_allocator();

} // namespace memplug

#endif
