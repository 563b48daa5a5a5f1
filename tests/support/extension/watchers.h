// Watchers of operators that record each call.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bus.h"

namespace memplug {

// The behaviour of one watcher.
struct Noting {
  bool throws = false; // throws when an operator begins
  bool declines = false; // does not ask to see the operator's end
};

inline std::array<Noting, WATCHERS> noting;
inline std::vector<std::tuple<size_t, std::string, bool>> heard; // watcher's order, operator, whether it ended

template <size_t ORDER>
bool note_beginning(OperatorCall& call) {
  heard.emplace_back(ORDER, call.function.name(), false);
  if (noting[ORDER].throws) {
    throw std::runtime_error("a watcher fails");
  }
  return !noting[ORDER].declines;
}

template <size_t ORDER>
void note_end(OperatorCall& call) {
  heard.emplace_back(ORDER, call.function.name(), true);
}

template <Need NEED>
constexpr std::array<Watcher, WATCHERS> kNoting{{
    {NEED, note_beginning<0>, note_end<0>},
    {NEED, note_beginning<1>, note_end<1>},
    {NEED, note_beginning<2>, note_end<2>},
}};

inline const Watcher& noting_watcher(size_t order, int need) {
  static constexpr std::array<const std::array<Watcher, WATCHERS>*, 3> all{
      &kNoting<Need::BEGINNINGS>, &kNoting<Need::ENDS>, &kNoting<Need::TENSORS>};
  return all.at(need)->at(order);
}

} // namespace memplug
