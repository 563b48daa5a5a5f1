// The CUDA allocator, listened to: its own trace says every malloc and free, with the bytes as asked for.
//
// A wrapper would have to give recorded blocks a deleter of its own to see their frees, and the native allocator's
// `recordStream` ignores, without a word, blocks whose deleter is not its own. So nothing is wrapped: blocks,
// statistics, snapshots, streams and pools stay native. torch has no way to take a listener off again: it is attached
// once, and returns at once while nobody records.
#ifdef MEMPLUG_CUDA

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <mutex>

#include "requests.h"

namespace memplug {
namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

std::atomic<int> listened{-1}; // index of the device

// Called under the allocator's lock.
void listen(const TraceEntry& entry) {
  if (entry.device_ != listened.load(std::memory_order_relaxed)) {
    return;
  }
  if (entry.action_ == TraceEntry::ALLOC) {
    note_malloc(reinterpret_cast<void*>(entry.addr_), entry.size_, entry.stream_);
  } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
    note_free(reinterpret_cast<void*>(entry.addr_), entry.size_);
  }
}

} // namespace

void install_cuda(int device) {
  static std::once_flag once;
  std::call_once(once, [] { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&listen); });
  listened = device;
}

void uninstall_cuda() {
  listened = -1;
  forget_blocks();
}

} // namespace memplug

#endif
