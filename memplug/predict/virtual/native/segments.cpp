// Where memory of the simulated allocator comes from, and goes back to: segments, or pages of ranges.
#include <algorithm>
#include <new>

#include "memory.h"

namespace memplug {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kSmallSegment = 2 * kMiB, kLargeSegment = 20 * kMiB; // and pages, where they are expandable
constexpr int64_t kLarge = 10 * kMiB; // from it on, segments of their own
constexpr int64_t kRound = 2 * kMiB;
constexpr int64_t kRange = (int64_t(1) << 38) / kLargeSegment * kLargeSegment; // bytes; more than any device has

int64_t rounded(int64_t nbytes, int64_t to) {
  return (nbytes + to - 1) / to * to;
}

int64_t page(bool small) {
  return small ? kSmallSegment : kLargeSegment;
}

} // namespace

// None of them was given out before, and they begin with a page.
char* CachingMemory::addresses(int64_t nbytes) {
  char* const begin = next_ + (kLargeSegment - reinterpret_cast<intptr_t>(next_) % kLargeSegment) % kLargeSegment;
  if (nbytes > end_ - begin) {
    throw std::bad_alloc();
  }
  next_ = begin + nbytes;
  return begin;
}

// A free block that is large enough; null: the device has no more.
CachingMemory::Block* CachingMemory::more(Pool& pool, int64_t size) {
  if (pool.expandable) {
    return expanded(pool, size);
  }
  return add_segment(pool, pool.small || size < kLarge ? page(pool.small) : rounded(size, kRound));
}

CachingMemory::Block* CachingMemory::add_segment(Pool& pool, int64_t nbytes) {
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

CachingMemory::Block* CachingMemory::expanded(Pool& pool, int64_t size) {
  if (size > std::min(capacity_, kRange)) {
    return nullptr;
  }
  Block* block = place_in_range(pool, size);
  take(block);
  if (!block->is_mapped && !map(block, size)) {
    put(block);
    return nullptr;
  }
  while (block->nbytes < size) {
    Block* const next = block->after;
    take(next);
    if (!next->is_mapped && !map(next, size - block->nbytes)) {
      put(next);
      put(block); // what it has got so far stays
      return nullptr;
    }
    block = merged(block, next);
  }
  return put(block);
}

// The first of free neighbours with addresses enough, at the lowest ones that are without memory.
CachingMemory::Block* CachingMemory::place_in_range(Pool& pool, int64_t size) {
  for (char* const address : pool.unmapped) {
    Block* first = blocks_.at(address).get();
    if (first->before != nullptr && first->before->is_free) {
      first = first->before;
    }
    int64_t nbytes = 0;
    for (const Block* each = first; each != nullptr && each->is_free && nbytes < size; each = each->after) {
      nbytes += each->nbytes;
    }
    if (nbytes >= size) {
      return first;
    }
  }
  return put(add({addresses(kRange), kRange, 0, &pool, true, false, nullptr, nullptr, {}}));
}

// The first pages of a block that is not among the free ones get memory, as many as it takes. False: the device has no more.
bool CachingMemory::map(Block* block, int64_t nbytes) {
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

// The whole pages of a free block give their memory back. False: it has none.
bool CachingMemory::unmap(Block* block) {
  const int64_t size = page(block->pool->small), at = reinterpret_cast<intptr_t>(block->address);
  const int64_t begin = rounded(at, size) - at, end = (at + block->nbytes) / size * size - at; // in the block
  if (end <= begin) {
    return false;
  }
  take(block);
  if (end < block->nbytes) {
    put(cut(block, end));
  }
  if (begin > 0) {
    Block* const inner = cut(block, begin);
    put(block);
    block = inner;
  }
  block->is_mapped = false;
  usage_.reserved -= block->nbytes;
  put(block);
  return true;
}

// Bytes of free blocks that `release_free` would leave.
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

// All that is free goes back to the device; the host waits until other streams are past what they use. False: nothing is.
bool CachingMemory::release_free() {
  for (const Pending& each : pending_) {
    clocks_.wait(each.over_s);
  }
  process_pending();
  std::vector<Block*> free;
  for (const auto& [address, block] : blocks_) {
    const bool whole = block->before == nullptr && block->after == nullptr;
    if (block->is_free && block->is_mapped && (block->pool->expandable || whole)) {
      free.push_back(block.get());
    }
  }
  bool any = false;
  for (Block* const block : free) {
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
