// A simulation of torch's caching allocator of CUDA: it serves addresses without memory.
//
// It follows c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes. Each stream has a pool for small
// requests and a pool for large ones. A request gets the smallest free block that holds it; of equally large blocks,
// the one with the lowest address. Blocks are split, and merged with free neighbours. If the device has no more memory,
// free segments are released to the device. If other streams use a freed block, the block is reused only after the work
// that was queued on these streams when it was freed. With expandable segments, a pool has ranges of addresses instead
// of segments, and maps pages of the ranges to memory.
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
  // bytes of requests, of the blocks that serve them, and of all segments and mapped pages
  int64_t requested = 0, allocated = 0, reserved = 0;
  int64_t requested_peak = 0, allocated_peak = 0, reserved_peak = 0;
  int64_t retries = 0; // requests for which free segments had to be released
  int64_t holes = 0; // free bytes that cannot be released, because blocks in use share their segment or page
};

class CachingMemory {
 public:
  explicit CachingMemory(Clocks& clocks);

  // Returns the address of a new block; throws torch's OutOfMemoryError if the device has no more memory.
  void* malloc(int64_t nbytes, int64_t stream);
  void free(void* address);

  // Notes that work on `stream` uses the block too.
  void use_on(void* address, int64_t stream);

  // Releases free segments to the device.
  void empty_cache();

  // Releases free segments and resets peaks and retries. If no block is in use, addresses begin anew: the next requests
  // get the addresses of the process's first requests.
  void restart();

  void limit(int64_t nbytes); // sets the device's capacity
  void expand_segments(bool on); // applies to later requests
  VirtualMemory usage() const;
  void reset_peaks();

 private:
  struct PoolBlock;
  using Free = std::set<std::pair<int64_t, char*>>; // pairs of size in bytes and address
  struct Pool {
    int64_t stream;
    bool small, expandable;
    Free free; // free blocks that have memory
    std::set<char*> unmapped{}; // addresses of free blocks that have no memory
  };
  struct PoolBlock {
    char* address;
    int64_t nbytes, requested;
    Pool* pool;
    bool is_free, is_mapped;
    PoolBlock *before, *after; // neighbours in the same segment or range
    std::set<int64_t> streams; // other streams that use the block
  };
  // A freed block that other streams still use until `over_s`.
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

  // defined in segments.cpp
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
  std::map<std::tuple<int64_t, bool, bool>, Pool> pools_; // by `stream`, `small` and `expandable` of the pool
  std::map<char*, std::unique_ptr<PoolBlock>> blocks_;
  std::vector<PendingFree> pending_;
  std::multimap<int64_t, char*> unused_; // addresses of released segments, by size
  char *begin_ = nullptr, *next_ = nullptr, *end_ = nullptr; // the reserved addresses; next_: the first one never used
};

} // namespace memplug
