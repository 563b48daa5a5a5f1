#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace memplug {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr size_t kAddresses = size_t(1) << 45; // bytes, none of which is ever touched
constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kSmallestBlock = 512;
constexpr int64_t kSmall = kMiB; // up to it, the small pool
constexpr int64_t kSmallSegment = 2 * kMiB, kLargeSegment = 20 * kMiB;
constexpr int64_t kLarge = 10 * kMiB; // from it on, segments of their own
constexpr int64_t kRound = 2 * kMiB;

int64_t rounded(int64_t nbytes, int64_t to) {
  return (nbytes + to - 1) / to * to;
}

} // namespace

CachingMemory::CachingMemory(const Clocks& clocks) : clocks_(clocks) {
  void* const begin = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw std::bad_alloc();
  }
  next_ = static_cast<char*>(begin);
}

void* CachingMemory::malloc(int64_t nbytes, int64_t stream) {
  const Lock lock(mutex_);
  process_pending();
  const int64_t size = rounded(nbytes, kSmallestBlock);
  const bool small = size <= kSmall;
  Pool& pool = pools_.try_emplace({stream, small}, Pool{small, {}}).first->second;
  const auto fit = pool.free.lower_bound({size, nullptr});
  Block* block = fit != pool.free.end() ? blocks_.at(fit->second).get() : nullptr;
  if (block == nullptr) {
    const int64_t segment = small ? kSmallSegment : size < kLarge ? kLargeSegment : rounded(size, kRound);
    block = add_segment(pool, segment);
    if (block == nullptr && release_free_segments()) {
      ++usage_.retries;
      block = add_segment(pool, segment);
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
  }
  pool.free.erase({block->nbytes, block->address});
  block->is_free = false;
  const int64_t left = block->nbytes - size;
  if (small ? left >= kSmallestBlock : left > kSmall) {
    auto rest = std::make_unique<Block>(Block{block->address + size, left, 0, &pool, true, block, block->after, {}});
    if (block->after != nullptr) {
      block->after->before = rest.get();
    }
    block->after = rest.get();
    block->nbytes = size;
    pool.free.insert({left, rest->address});
    blocks_.emplace(rest->address, std::move(rest));
  }
  block->requested = nbytes;
  usage_.requested += nbytes;
  usage_.allocated += block->nbytes;
  note_peaks();
  return block->address;
}

void CachingMemory::free(void* address) {
  const Lock lock(mutex_);
  Block* const block = blocks_.at(static_cast<char*>(address)).get();
  usage_.requested -= block->requested;
  usage_.allocated -= block->nbytes;
  double over_s = 0;
  for (const int64_t stream : std::exchange(block->streams, {})) {
    over_s = std::max(over_s, clocks_.over_s(stream));
  }
  if (over_s > clocks_.host_s()) {
    pending_.push_back({address, over_s});
  } else {
    give_back(block);
  }
}

void CachingMemory::use_on(void* address, int64_t stream) {
  const Lock lock(mutex_);
  blocks_.at(static_cast<char*>(address))->streams.insert(stream);
}

void CachingMemory::empty_cache() {
  const Lock lock(mutex_);
  process_pending();
  release_free_segments();
}

void CachingMemory::limit(int64_t nbytes) {
  const Lock lock(mutex_);
  capacity_ = nbytes;
}

int64_t CachingMemory::capacity() const {
  const Lock lock(mutex_);
  return capacity_;
}

VirtualMemory CachingMemory::usage() const {
  const Lock lock(mutex_);
  return usage_;
}

void CachingMemory::reset_peaks() {
  const Lock lock(mutex_);
  usage_.requested_peak = usage_.allocated_peak = usage_.reserved_peak = 0;
  note_peaks();
}

// Null: the device has no more.
CachingMemory::Block* CachingMemory::add_segment(Pool& pool, int64_t nbytes) {
  if (nbytes > capacity_ - usage_.reserved) {
    return nullptr;
  }
  char* address = next_;
  if (const auto unused = unused_.find(nbytes); unused != unused_.end()) {
    address = unused->second;
    unused_.erase(unused);
  } else {
    next_ += nbytes;
  }
  usage_.reserved += nbytes;
  pool.free.insert({nbytes, address});
  auto block = std::make_unique<Block>(Block{address, nbytes, 0, &pool, true, nullptr, nullptr, {}});
  return blocks_.emplace(address, std::move(block)).first->second.get();
}

// Two neighbours as one; neither is among the free ones.
CachingMemory::Block* CachingMemory::merged(Block* one, Block* other) {
  Block* const first = one->after == other ? one : other;
  Block* const second = first->after;
  first->nbytes += second->nbytes;
  first->after = second->after;
  if (second->after != nullptr) {
    second->after->before = first;
  }
  blocks_.erase(second->address);
  return first;
}

void CachingMemory::give_back(Block* block) {
  Free& free = block->pool->free;
  for (Block* const neighbour : {block->before, block->after}) {
    if (neighbour != nullptr && neighbour->is_free) {
      free.erase({neighbour->nbytes, neighbour->address});
      block = merged(block, neighbour);
    }
  }
  block->is_free = true;
  free.insert({block->nbytes, block->address});
}

void CachingMemory::process_pending() {
  const double now_s = clocks_.host_s();
  for (auto each = pending_.begin(); each != pending_.end();) {
    if (each->over_s <= now_s) {
      give_back(blocks_.at(static_cast<char*>(each->address)).get());
      each = pending_.erase(each);
    } else {
      ++each;
    }
  }
}

bool CachingMemory::release_free_segments() {
  bool any = false;
  for (auto each = blocks_.begin(); each != blocks_.end();) {
    const Block& block = *each->second;
    if (block.is_free && block.before == nullptr && block.after == nullptr) {
      block.pool->free.erase({block.nbytes, block.address});
      usage_.reserved -= block.nbytes;
      unused_.emplace(block.nbytes, block.address);
      each = blocks_.erase(each);
      any = true;
    } else {
      ++each;
    }
  }
  return any;
}

void CachingMemory::note_peaks() {
  usage_.requested_peak = std::max(usage_.requested_peak, usage_.requested);
  usage_.allocated_peak = std::max(usage_.allocated_peak, usage_.allocated);
  usage_.reserved_peak = std::max(usage_.reserved_peak, usage_.reserved);
}

} // namespace memplug
