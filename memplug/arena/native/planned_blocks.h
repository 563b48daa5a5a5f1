// The blocks in use at the offsets that a plan has chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "live_starts.h"
#include "pending_uses.h"

namespace memplug {

struct PlannedBlock {
  int64_t end;
  int64_t nbytes; // as requested
  Stream stream;
  int32_t row; // index of the planned request
  bool wanted; // see `ArenaDevice::handed_out`
};

// A plan's offsets have numbers, in ascending order. At most one block begins at an offset, and no two blocks overlap.
class PlannedBlocks {
 public:
  // `offsets` may be in any order, with duplicates.
  explicit PlannedBlocks(std::vector<int64_t> offsets = {});

  int64_t offset(int64_t number) const {
    return offsets_[number];
  }
  PlannedBlock& operator[](int64_t number) {
    return blocks_[number];
  }
  const PlannedBlock& operator[](int64_t number) const {
    return blocks_[number];
  }

  // Returns the number of the first offset at or above `offset`.
  int32_t number_from(int64_t offset) const;

  // Returns the number of the offset at which a block in use begins; -1: none begins at `offset`.
  int64_t in_use_at(int64_t offset) const;

  // Returns the number of the first block in use from offset number `number` on, or -1.
  int64_t next(int64_t number) const {
    return in_use_.from(number);
  }

  // Returns the number of the block in use that begins below offset number `number` and ends above `offset`, or -1.
  int64_t reaching(int64_t number, int64_t offset) const {
    const int64_t before = in_use_.before(number);
    return before >= 0 && blocks_[before].end > offset ? before : -1;
  }

  void add(int64_t number, const PlannedBlock& block) {
    in_use_.add(number);
    blocks_[number] = block;
  }
  void remove(int64_t number) {
    in_use_.remove(number);
  }

 private:
  std::vector<int64_t> offsets_;
  std::vector<int32_t> table_; // hash table from an offset to its number; -1: empty
  LiveStarts in_use_;
  std::vector<PlannedBlock> blocks_; // by number
};

} // namespace memplug
