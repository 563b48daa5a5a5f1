// Runs of neighbouring bytes in use. Blocks that touch are one run, so that a search for free bytes skips all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

namespace memplug {

using Stretch = std::pair<int64_t, int64_t>; // offsets [begin, end)

class Runs {
 public:
  // Adds bytes of which none is in use.
  void add(int64_t begin, int64_t end) {
    auto after = runs_.lower_bound(begin);
    if (after != runs_.end() && after->first == end) {
      end = after->second;
      after = runs_.erase(after);
    }
    if (after != runs_.begin() && std::prev(after)->second == begin) {
      std::prev(after)->second = end;
    } else {
      runs_.emplace_hint(after, begin, end);
    }
  }

  // Removes bytes that are in use.
  void remove(int64_t begin, int64_t end) {
    const auto run = std::prev(runs_.upper_bound(begin));
    const int64_t run_end = run->second;
    if (run->first == begin) {
      runs_.erase(run);
    } else {
      run->second = begin;
    }
    if (end < run_end) {
      runs_.emplace(end, run_end);
    }
  }

  // Returns the first run that overlaps [from, end), from `from` on; an empty stretch at `end` if there is none.
  Stretch first(int64_t from, int64_t end) const {
    auto run = runs_.upper_bound(from);
    if (run != runs_.begin() && std::prev(run)->second > from) {
      --run;
    }
    return run != runs_.end() && run->first < end ? Stretch{std::max(run->first, from), run->second} : Stretch{end, end};
  }

  // Returns the last run that overlaps [from, end), up to `end`; an empty stretch at `from` if there is none.
  Stretch last(int64_t from, int64_t end) const {
    const auto after = runs_.lower_bound(end);
    if (after == runs_.begin() || std::prev(after)->second <= from) {
      return {from, from};
    }
    return {std::prev(after)->first, std::min(std::prev(after)->second, end)};
  }

 private:
  std::map<int64_t, int64_t> runs_; // from begin to end
};

} // namespace memplug
