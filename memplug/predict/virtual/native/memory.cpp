#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace memplug {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr size_t kAddresses = size_t(1) << 45; // bytes; no address is accessed
constexpr int64_t kSmallestBlock = 512;
constexpr int64_t kSmall = 1 << 20; // largest request of the small pool

} // namespace

CachingMemory::CachingMemory(Clocks& clocks) : clocks_(clocks) {
  void* const begin = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw std::bad_alloc();
  }
  begin_ = next_ = static_cast<char*>(begin);
  end_ = begin_ + kAddresses;
}

void* CachingMemory::malloc(int64_t nbytes, int64_t stream) {
  const Lock lock(mutex_);
  process_pending();
  const int64_t size = (nbytes + kSmallestBlock - 1) / kSmallestBlock * kSmallestBlock;
  const bool small = size <= kSmall;
  Pool& pool = pools_.try_emplace({stream, small, expands_}, Pool{stream, small, expands_, {}}).first->second;
  const auto fit = pool.free.lower_bound({size, nullptr});
  PoolBlock* block = fit != pool.free.end() ? blocks_.at(fit->second).get() : more(pool, size);
  if (block == nullptr && release_free()) {
    ++usage_.retries;
    block = more(pool, size);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      block != nullptr,
      "virtual device out of memory. Tried to allocate ",
      nbytes,
      " bytes. It has ",
      capacity_,
      ", of which ",
      usage_.allocated,
      " are allocated, and ",
      usage_.reserved - usage_.allocated,
      " are reserved but unallocated");
  take(block);
  const int64_t left = block->nbytes - size;
  if (small || expands_ ? left >= kSmallestBlock : left > kSmall) {
    put(cut(block, size));
  }
  block->requested = nbytes;
  usage_.requested += nbytes;
  usage_.allocated += block->nbytes;
  note_peaks();
  return block->address;
}

void CachingMemory::free(void* address) {
  const Lock lock(mutex_);
  PoolBlock* const block = blocks_.at(static_cast<char*>(address)).get();
  usage_.requested -= block->requested;
  usage_.allocated -= block->nbytes;
  double over_s = 0;
  for (const int64_t stream : std::exchange(block->streams, {})) {
    over_s = std::max(over_s, clocks_.over_s(stream));
  }
  if (over_s > clocks_.host_s()) {
    pending_.push_back({address, over_s});
  } else {
    put(block);
  }
}

void CachingMemory::use_on(void* address, int64_t stream) {
  const Lock lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(address)); // blocks that an arena serves are not in the map
  if (found != blocks_.end() && stream != found->second->pool->stream) { // work on the block's own stream is ordered anyway
    found->second->streams.insert(stream);
  }
}

void CachingMemory::empty_cache() {
  const Lock lock(mutex_);
  release_free();
}

void CachingMemory::restart() {
  const Lock lock(mutex_);
  release_free();
  unused_.clear();
  if (usage_.allocated == 0) {
    blocks_.clear(); // the remaining blocks are unmapped ranges
    pools_.clear();
    next_ = begin_;
  }
  usage_.retries = 0;
  reset_usage_peaks();
}

void CachingMemory::limit(int64_t nbytes) {
  const Lock lock(mutex_);
  capacity_ = nbytes;
}

void CachingMemory::expand_segments(bool on) {
  const Lock lock(mutex_);
  expands_ = on;
}

VirtualMemory CachingMemory::usage() const {
  const Lock lock(mutex_);
  VirtualMemory now = usage_;
  now.holes = holes();
  return now;
}

void CachingMemory::reset_peaks() {
  const Lock lock(mutex_);
  reset_usage_peaks();
}

// -- blocks -----------------------------------------------------------------------------------------------------------------

CachingMemory::PoolBlock* CachingMemory::add(PoolBlock block) {
  char* const address = block.address;
  return blocks_.emplace(address, std::make_unique<PoolBlock>(std::move(block))).first->second.get();
}

// Cuts a block after `nbytes` and returns the rest. Neither part is in the free lists.
CachingMemory::PoolBlock* CachingMemory::cut(PoolBlock* block, int64_t nbytes) {
  PoolBlock* const rest = add(
      {block->address + nbytes, block->nbytes - nbytes, 0, block->pool, false, block->is_mapped, block, block->after, {}});
  if (block->after != nullptr) {
    block->after->before = rest;
  }
  block->after = rest;
  block->nbytes = nbytes;
  return rest;
}

// Merges two neighbours that are not in the free lists, and returns the merged block.
CachingMemory::PoolBlock* CachingMemory::merged(PoolBlock* one, PoolBlock* other) {
  PoolBlock* const first = one->after == other ? one : other;
  PoolBlock* const second = first->after;
  first->nbytes += second->nbytes;
  first->after = second->after;
  if (second->after != nullptr) {
    second->after->before = first;
  }
  blocks_.erase(second->address);
  return first;
}

// Puts a block into the free lists, merged with its free neighbours, and returns the merged block.
CachingMemory::PoolBlock* CachingMemory::put(PoolBlock* block) {
  for (PoolBlock* const neighbour : {block->before, block->after}) {
    if (neighbour != nullptr && neighbour->is_free && neighbour->is_mapped == block->is_mapped) {
      take(neighbour);
      block = merged(block, neighbour);
    }
  }
  block->is_free = true;
  block->is_mapped ? (void)block->pool->free.insert({block->nbytes, block->address})
                   : (void)block->pool->unmapped.insert(block->address);
  return block;
}

// Takes a block out of the free lists.
void CachingMemory::take(PoolBlock* block) {
  block->is_free = false;
  block->is_mapped ? block->pool->free.erase({block->nbytes, block->address}) : block->pool->unmapped.erase(block->address);
}

void CachingMemory::process_pending() {
  const double now_s = clocks_.host_s();
  for (auto each = pending_.begin(); each != pending_.end();) {
    if (each->over_s <= now_s) {
      put(blocks_.at(static_cast<char*>(each->address)).get());
      each = pending_.erase(each);
    } else {
      ++each;
    }
  }
}

void CachingMemory::reset_usage_peaks() {
  usage_.requested_peak = usage_.allocated_peak = usage_.reserved_peak = 0;
  note_peaks();
}

void CachingMemory::note_peaks() {
  usage_.requested_peak = std::max(usage_.requested_peak, usage_.requested);
  usage_.allocated_peak = std::max(usage_.allocated_peak, usage_.allocated);
  usage_.reserved_peak = std::max(usage_.reserved_peak, usage_.reserved);
}

} // namespace memplug
