// Memory of a device that has none: addresses, given out as torch's caching allocator of CUDA does.
//
// After c10/cuda/CUDACachingAllocator.cpp: sizes rounded to 512 bytes, of each stream one pool for small requests and one for large
// ones, best fit by size and then address, splitting, coalescing with free neighbours; where the device has no more, segments that
// are free go back to it. What is used on another stream is free once that is past its use. Where segments are expandable, a pool
// has ranges of addresses instead, of which pages have memory.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "clocks.h"

namespace memplug {

struct VirtualMemory {
  int64_t requested = 0, allocated = 0, reserved = 0; // bytes in use as asked for, and as rounded up; of all segments
  int64_t requested_peak = 0, allocated_peak = 0, reserved_peak = 0;
  int64_t retries = 0; // requests for which segments went back
  int64_t holes = 0; // bytes that are free now, and cannot go back: beside blocks in use
};

class CachingMemory {
 public:
  explicit CachingMemory(Clocks& clocks);

  // Throws torch's OutOfMemoryError where the device has no more.
  void* malloc(int64_t nbytes, int64_t stream);
  void free(void* address);

  // It is used on that stream, too, by what is queued there now.
  void use_on(void* address, int64_t stream);

  // Segments that are free go back.
  void empty_cache();

  // The same, and nothing is known of what was served before: where no block is in use, addresses begin again too, so that later
  // requests are placed as the first ones were.
  void restart();

  void limit(int64_t nbytes); // that the device has
  void expand_segments(bool on); // from here on
  VirtualMemory usage() const;
  void reset_peaks();

 private:
  struct Block;
  using Free = std::set<std::pair<int64_t, char*>>; // bytes and address
  struct Pool {
    int64_t stream;
    bool small, expandable;
    Free free; // with memory
    std::set<char*> unmapped{}; // without
  };
  struct Block {
    char* address;
    int64_t nbytes, requested;
    Pool* pool;
    bool is_free, is_mapped;
    Block *before, *after; // of its segment
    std::set<int64_t> streams; // that use it besides
  };
  struct Pending {
    void* address;
    double over_s;
  };

  Block* add(Block block);
  Block* cut(Block* block, int64_t nbytes);
  Block* merged(Block* one, Block* other);
  Block* put(Block* block);
  void take(Block* block);
  void process_pending();

  // segments.cpp
  char* addresses(int64_t nbytes);
  Block* more(Pool& pool, int64_t size);
  Block* add_segment(Pool& pool, int64_t nbytes);
  Block* expanded(Pool& pool, int64_t size);
  Block* place_in_range(Pool& pool, int64_t size);
  bool map(Block* block, int64_t nbytes);
  bool unmap(Block* block);
  bool release_free();
  int64_t holes() const;
  void note_peaks();
  void reset_usage_peaks();

  Clocks& clocks_;
  mutable std::mutex mutex_;
  int64_t capacity_ = INT64_MAX;
  VirtualMemory usage_;
  bool expands_ = false;
  std::map<std::tuple<int64_t, bool, bool>, Pool> pools_; // by stream, and whether small and expandable
  std::map<char*, std::unique_ptr<Block>> blocks_;
  std::vector<Pending> pending_;
  std::multimap<int64_t, char*> unused_; // addresses of segments that went back
  char *begin_ = nullptr, *next_ = nullptr, *end_ = nullptr; // of the addresses that there are
};

} // namespace memplug
