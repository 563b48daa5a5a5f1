// A simulation of torch's caching allocator of CUDA: it serves addresses without memory.
//
// It follows c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Each stream has one pool for small requests and
// one for large ones. A request gets the best fit by size and then address; blocks are split, and coalesced with free neighbours.
// If the device has no more memory, free segments are released to it. A block that another stream uses is free once that stream
// is past the use. With expandable segments, a pool has ranges of addresses instead, and pages of them are mapped to memory.
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
  int64_t requested = 0, allocated = 0, reserved = 0; // bytes in use as requested; as rounded up; of all segments
  int64_t requested_peak = 0, allocated_peak = 0, reserved_peak = 0;
  int64_t retries = 0; // requests for which segments were released
  int64_t holes = 0; // free bytes that cannot be released, because blocks in use share their segment or page
};

class CachingMemory {
 public:
  explicit CachingMemory(Clocks& clocks);

  // Returns an address; throws torch's OutOfMemoryError if the device has no more memory.
  void* malloc(int64_t nbytes, int64_t stream);
  void free(void* address);

  // Notes that work queued on this stream now uses the block too.
  void use_on(void* address, int64_t stream);

  // Releases free segments to the device.
  void empty_cache();

  // Releases free segments and resets all counters. If no block is in use, addresses begin again too, so later requests are placed
  // as the first ones were.
  void restart();

  void limit(int64_t nbytes); // sets the device's capacity
  void expand_segments(bool on); // applies to later requests
  VirtualMemory usage() const;
  void reset_peaks();

 private:
  struct PoolBlock;
  using Free = std::set<std::pair<int64_t, char*>>; // size in bytes and address
  struct Pool {
    int64_t stream;
    bool small, expandable;
    Free free; // free blocks with memory
    std::set<char*> unmapped{}; // free blocks without memory
  };
  struct PoolBlock {
    char* address;
    int64_t nbytes, requested;
    Pool* pool;
    bool is_free, is_mapped;
    PoolBlock *before, *after; // neighbours in its segment
    std::set<int64_t> streams; // other streams that use it
  };
  struct PendingFree {
    void* address;
    double over_s;
  };

  PoolBlock* add(PoolBlock block);
  PoolBlock* cut(PoolBlock* block, int64_t nbytes);
  PoolBlock* merged(PoolBlock* one, PoolBlock* other);
  PoolBlock* put(PoolBlock* block);
  void take(PoolBlock* block);
  void process_pending();

  // segments.cpp
  char* addresses(int64_t nbytes);
  PoolBlock* more(Pool& pool, int64_t size);
  PoolBlock* add_segment(Pool& pool, int64_t nbytes);
  PoolBlock* expanded(Pool& pool, int64_t size);
  PoolBlock* place_in_range(Pool& pool, int64_t size);
  bool map(PoolBlock* block, int64_t nbytes);
  bool unmap(PoolBlock* block);
  bool release_free();
  int64_t holes() const;
  void note_peaks();
  void reset_usage_peaks();

  Clocks& clocks_;
  mutable std::mutex mutex_;
  int64_t capacity_ = INT64_MAX;
  VirtualMemory usage_;
  bool expands_ = false;
  std::map<std::tuple<int64_t, bool, bool>, Pool> pools_; // by stream, small, and expandable
  std::map<char*, std::unique_ptr<PoolBlock>> blocks_;
  std::vector<PendingFree> pending_;
  std::multimap<int64_t, char*> unused_; // addresses of released segments, by size
  char *begin_ = nullptr, *next_ = nullptr, *end_ = nullptr; // the reserved range of addresses, and its first unused one
};

} // namespace memplug
