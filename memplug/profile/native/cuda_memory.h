// Counts the CUDA allocator's bytes in use by a trace tracker (cuda_allocator.cpp), and adds the arena's.
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
  int64_t requested;
  int64_t allocated; // rounded up by the allocator
};

// Starts counting from the allocator's current bytes in use and its peak so far, both without the arena's bytes.
void begin_device_peak(int device, DeviceBytes in_use, DeviceBytes peak);

// Returns the peak of the allocator's and the arena's bytes together since the last reset.
DeviceBytes device_peak();
void reset_device_peak();

// Sets the arena's bytes in use: as requested, and rounded up.
void note_arena_use(int64_t live_bytes, int64_t live_size);

// While an instance lives, requests of the calling thread are neither recorded nor counted.
struct Unheard {
  Unheard();
  ~Unheard();
};

// Makes memplug's allocator in front of the device's (cuda_front.cpp), but does not install it. Throws if this version
// of torch has calls that hands_on.h does not know.
void prepare_cuda_allocator(int device);
// Installs memplug's allocator for a `User` (requests.h), or ends its use by this `User`. After the last use, the
// allocator stays until the arena has no memory: `record_stream` of an arena's block must not reach the native
// allocator, which would ignore it.
void stand_before_cuda(User user, bool on);
void note_arena_memory(int parts); // `parts`: number of pieces of memory that the arena has reserved now
c10::cuda::CUDACachingAllocator::CUDAAllocator& native_cuda_allocator();

} // namespace memplug

#endif
