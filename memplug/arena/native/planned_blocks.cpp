#include "planned_blocks.h"

#include <algorithm>
#include <utility>

#include "blocks.h"

namespace memplug {
namespace {

size_t hash_of(int64_t offset, size_t mask) {
  return static_cast<uint64_t>(offset / BLOCK_BYTES) * 0x9E3779B97F4A7C15ull >> 20 & mask;
}

} // namespace

PlannedBlocks::PlannedBlocks(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {
  std::sort(offsets_.begin(), offsets_.end());
  offsets_.erase(std::unique(offsets_.begin(), offsets_.end()), offsets_.end());
  in_use_ = LiveStarts(offsets_.size() + 1);
  blocks_.resize(offsets_.size());
  size_t entries = 16;
  while (entries < 2 * offsets_.size()) {
    entries *= 2;
  }
  table_.assign(entries, -1);
  for (size_t i = 0; i < offsets_.size(); ++i) {
    size_t at = hash_of(offsets_[i], entries - 1);
    while (table_[at] >= 0) {
      at = (at + 1) & (entries - 1);
    }
    table_[at] = static_cast<int32_t>(i);
  }
}

int32_t PlannedBlocks::number_from(int64_t offset) const {
  return static_cast<int32_t>(std::lower_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin());
}

int64_t PlannedBlocks::in_use_at(int64_t offset) const {
  const size_t mask = table_.size() - 1;
  for (size_t at = hash_of(offset, mask); table_[at] >= 0; at = (at + 1) & mask) {
    if (offsets_[table_[at]] == offset) {
      return in_use_.holds(table_[at]) ? table_[at] : -1;
    }
  }
  return -1;
}

} // namespace memplug
