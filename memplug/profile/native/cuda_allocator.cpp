// Records requests to CUDA's allocator by a trace tracker, a callback of torch's that sees every malloc and free with
// the requested bytes.
//
// An allocator in front of the native one, which is torch's own, could see the frees of recorded blocks only by giving
// them its own deleter. But the native allocator's `recordStream` silently ignores blocks with a foreign deleter. With
// the tracker, blocks, statistics, snapshots, streams and pools stay native. torch cannot remove a tracker. So memplug
// attaches a single one, which returns immediately while requests are neither recorded nor counted.
#ifdef MEMPLUG_CUDA

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "blocks.h"
#include "cuda_memory.h"
#include "requests.h"

namespace memplug {
namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

std::atomic<int> recorded{-1}; // index of the device whose requests are recorded; -1: none
std::atomic<int> counted{-1}; // index of the device whose bytes in use are counted; -1: none
thread_local int unheard = 0;

// Bytes in use, requested or allocated: of the native allocator, of the arena, and the peak of their sum.
struct UsedBytes {
  std::atomic<int64_t> native{0}, arena{0}, peak{0};

  void raise() {
    const int64_t now = native.load(std::memory_order_relaxed) + arena.load(std::memory_order_relaxed);
    int64_t most = peak.load(std::memory_order_relaxed);
    while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  void reset() {
    peak = native + arena;
  }
};

UsedBytes requested, allocated;

void count(int64_t nbytes, int sign) {
  requested.native += sign * nbytes;
  allocated.native += sign * in_blocks(nbytes);
  if (sign > 0) {
    requested.raise();
    allocated.raise();
  }
}

// The trace tracker. torch calls it while holding the allocator's lock.
void listen(const TraceEntry& entry) {
  const bool malloc = entry.action_ == TraceEntry::ALLOC;
  if (unheard > 0 || !(malloc || entry.action_ == TraceEntry::FREE_REQUESTED)) {
    return;
  }
  if (entry.device_ == counted.load(std::memory_order_relaxed)) {
    count(static_cast<int64_t>(entry.size_), malloc ? 1 : -1);
  }
  if (entry.device_ != recorded.load(std::memory_order_relaxed)) {
    return;
  }
  if (malloc) {
    note_malloc(reinterpret_cast<void*>(entry.addr_), entry.size_, entry.stream_);
  } else {
    note_free(reinterpret_cast<void*>(entry.addr_), entry.size_);
  }
}

void attach() {
  static std::once_flag once;
  std::call_once(once, [] { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&listen); });
}

} // namespace

void install_cuda(int device) {
  attach();
  recorded = device;
}

void uninstall_cuda() {
  recorded = -1;
  forget_blocks();
}

void begin_device_peak(int device, DeviceBytes in_use, DeviceBytes peak) {
  attach();
  requested.native = in_use.requested;
  allocated.native = in_use.allocated;
  requested.peak = peak.requested;
  allocated.peak = peak.allocated;
  counted = device;
}

DeviceBytes device_peak() {
  return {requested.peak, allocated.peak};
}

void reset_device_peak() {
  requested.reset();
  allocated.reset();
}

void note_arena_use(int64_t live_bytes, int64_t live_size) {
  requested.arena = live_bytes;
  allocated.arena = live_size;
  requested.raise();
  allocated.raise();
}

Unheard::Unheard() {
  ++unheard;
}

Unheard::~Unheard() {
  --unheard;
}

} // namespace memplug

#endif
