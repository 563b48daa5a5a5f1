// How the virtual device's allocator reserves and releases memory: as segments, or by mapping pages of address ranges.
#include <algorithm>
#include <new>

#include "memory.h"

namespace memplug {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kSmallSegment = 2 * kMiB, kLargeSegment = 20 * kMiB; // bytes; expandable pages have the same sizes
constexpr int64_t kLarge = 10 * kMiB; // a request of this size or more gets a segment of its size, rounded up to kRound
constexpr int64_t kRound = 2 * kMiB;
constexpr int64_t kRange = (int64_t(1) << 38) / kLargeSegment * kLargeSegment; // bytes of a range; more than any device has

int64_t rounded(int64_t nbytes, int64_t to) {
  return (nbytes + to - 1) / to * to;
}

int64_t page(bool small) {
  return small ? kSmallSegment : kLargeSegment;
}

} // namespace

// Returns page-aligned addresses that were never used before.
char* CachingMemory::addresses(int64_t nbytes) {
  char* const begin = next_ + (kLargeSegment - reinterpret_cast<intptr_t>(next_) % kLargeSegment) % kLargeSegment;
  if (nbytes > end_ - begin) {
    throw std::bad_alloc();
  }
  next_ = begin + nbytes;
  return begin;
}

// Reserves more memory and returns a free block of at least `size` bytes; null if the device has no more memory.
CachingMemory::PoolBlock* CachingMemory::more(Pool& pool, int64_t size) {
  if (pool.expandable) {
    return expanded(pool, size);
  }
  return add_segment(pool, pool.small || size < kLarge ? page(pool.small) : rounded(size, kRound));
}

CachingMemory::PoolBlock* CachingMemory::add_segment(Pool& pool, int64_t nbytes) {
  if (nbytes > capacity_ - usage_.reserved) {
    return nullptr;
  }
  char* address;
  if (const auto unused = unused_.find(nbytes); unused != unused_.end()) {
    address = unused->second;
    unused_.erase(unused);
  } else {
    address = addresses(nbytes);
  }
  usage_.reserved += nbytes;
  return put(add({address, nbytes, 0, &pool, true, true, nullptr, nullptr, {}}));
}

// -- expandable segments -----------------------------------------------------------------------------------------------------

CachingMemory::PoolBlock* CachingMemory::expanded(Pool& pool, int64_t size) {
  if (size > std::min(capacity_, kRange)) {
    return nullptr;
  }
  PoolBlock* block = place_in_range(pool, size);
  take(block);
  if (!block->is_mapped && !map(block, size)) {
    put(block);
    return nullptr;
  }
  while (block->nbytes < size) {
    PoolBlock* const next = block->after;
    take(next);
    if (!next->is_mapped && !map(next, size - block->nbytes)) {
      put(next);
      put(block); // the pages that are mapped so far stay mapped
      return nullptr;
    }
    block = merged(block, next);
  }
  return put(block);
}

// Finds the lowest address at which adjacent free blocks, not all of them mapped, have at least `size` bytes together.
// Returns the first of these blocks, or a new range if there are none.
CachingMemory::PoolBlock* CachingMemory::place_in_range(Pool& pool, int64_t size) {
  for (char* const address : pool.unmapped) {
    PoolBlock* first = blocks_.at(address).get();
    if (first->before != nullptr && first->before->is_free) {
      first = first->before;
    }
    int64_t nbytes = 0;
    for (const PoolBlock* each = first; each != nullptr && each->is_free && nbytes < size; each = each->after) {
      nbytes += each->nbytes;
    }
    if (nbytes >= size) {
      return first;
    }
  }
  return put(add({addresses(kRange), kRange, 0, &pool, true, false, nullptr, nullptr, {}}));
}

// Maps as many of a block's first pages as `nbytes` need, and cuts off the rest of the block. The block must not be in
// the free lists. Returns false, and changes nothing, if the device has no more memory.
bool CachingMemory::map(PoolBlock* block, int64_t nbytes) {
  nbytes = std::min(block->nbytes, rounded(nbytes, page(block->pool->small)));
  if (nbytes > capacity_ - usage_.reserved) {
    return false;
  }
  if (nbytes < block->nbytes) {
    put(cut(block, nbytes));
  }
  block->is_mapped = true;
  usage_.reserved += nbytes;
  return true;
}

// Unmaps the pages that lie wholly in a free block. Returns false if there are none.
bool CachingMemory::unmap(PoolBlock* block) {
  const int64_t size = page(block->pool->small), at = reinterpret_cast<intptr_t>(block->address);
  const int64_t begin = rounded(at, size) - at, end = (at + block->nbytes) / size * size - at; // offsets in the block
  if (end <= begin) {
    return false;
  }
  take(block);
  if (end < block->nbytes) {
    put(cut(block, end));
  }
  if (begin > 0) {
    PoolBlock* const inner = cut(block, begin);
    put(block);
    block = inner;
  }
  block->is_mapped = false;
  usage_.reserved -= block->nbytes;
  put(block);
  return true;
}

// Returns the number of mapped bytes in free blocks that `release_free` cannot release.
int64_t CachingMemory::holes() const {
  int64_t nbytes = 0;
  for (const auto& [address, block] : blocks_) {
    if (!block->is_free || !block->is_mapped) {
      continue;
    }
    if (block->pool->expandable) {
      const int64_t size = page(block->pool->small), at = reinterpret_cast<intptr_t>(address);
      nbytes += block->nbytes - std::max<int64_t>(0, (at + block->nbytes) / size * size - rounded(at, size));
    } else if (block->before != nullptr || block->after != nullptr) {
      nbytes += block->nbytes;
    }
  }
  return nbytes;
}

// Makes the host wait for the streams that still use freed blocks, then releases all free segments and pages to the
// device. Returns false if there were none.
bool CachingMemory::release_free() {
  for (const PendingFree& each : pending_) {
    clocks_.wait(each.over_s);
  }
  process_pending();
  std::vector<PoolBlock*> free;
  for (const auto& [address, block] : blocks_) {
    const bool whole = block->before == nullptr && block->after == nullptr;
    if (block->is_free && block->is_mapped && (block->pool->expandable || whole)) {
      free.push_back(block.get());
    }
  }
  bool any = false;
  for (PoolBlock* const block : free) {
    if (block->pool->expandable) {
      any |= unmap(block);
      continue;
    }
    take(block);
    usage_.reserved -= block->nbytes;
    unused_.emplace(block->nbytes, block->address);
    blocks_.erase(block->address);
    any = true;
  }
  return any;
}

} // namespace memplug
