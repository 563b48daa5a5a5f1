// A bitset with a fast successor (`from`) and predecessor (`before`): each reads at most five words if the set holds up
// to 262,144 integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

class LiveStarts {
 public:
  explicit LiveStarts(size_t count = 0) {
    do {
      count = (count + 63) / 64;
      levels_.emplace_back(count, 0);
    } while (count > 1);
  }

  bool holds(int64_t i) const {
    return levels_[0][i >> 6] >> (i & 63) & 1;
  }

  void add(int64_t i) {
    for (auto& level : levels_) {
      level[i >> 6] |= uint64_t{1} << (i & 63);
      i >>= 6;
    }
  }

  void remove(int64_t i) {
    for (auto& level : levels_) {
      if ((level[i >> 6] &= ~(uint64_t{1} << (i & 63))) != 0) {
        return;
      }
      i >>= 6;
    }
  }

  // Returns the largest member below `i`, or -1.
  int64_t before(int64_t i) const {
    for (size_t level = 0; level < levels_.size(); ++level, i >>= 6) {
      const uint64_t mask = (i & 63) != 0 ? ~uint64_t{0} >> (64 - (i & 63)) : 0;
      const uint64_t found = mask != 0 ? levels_[level][i >> 6] & mask : 0;
      if (found != 0) {
        return down<true>(level, (i >> 6 << 6) + 63 - __builtin_clzll(found));
      }
    }
    return -1;
  }

  // Returns the smallest member from `i` on, or -1.
  int64_t from(int64_t i) const {
    for (size_t level = 0; level < levels_.size(); ++level) {
      if (i >> 6 >= static_cast<int64_t>(levels_[level].size())) {
        return -1;
      }
      const uint64_t found = levels_[level][i >> 6] & (~uint64_t{0} << (i & 63));
      if (found != 0) {
        return down<false>(level, (i >> 6 << 6) + __builtin_ctzll(found));
      }
      i = (i >> 6) + 1;
    }
    return -1;
  }

 private:
  // Returns the smallest member (with `last`, the largest) that bit `i` of `level` stands for. A set bit says that its
  // word in the level below is not 0.
  template <bool last>
  int64_t down(size_t level, int64_t i) const {
    while (level-- > 0) {
      const uint64_t word = levels_[level][i];
      i = (i << 6) + (last ? 63 - __builtin_clzll(word) : __builtin_ctzll(word));
    }
    return i;
  }

  std::vector<std::vector<uint64_t>> levels_;
};

} // namespace memplug
