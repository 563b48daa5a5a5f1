// The rules of recompute passes. The native core and the planner (memplug/tokenwise/plan/rules.py) share them. They are
// plain C++, since the planner has no torch.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

// The action of a recompute pass on an operator. memplug/tokenwise/plan/rules.py repeats the values.
enum class Action : uint8_t { RUN, SUBSTITUTE, SKIP };

// How many rows of an operator's outputs are captured. If all are, a pass does not need the operator's inputs.
enum class Taken : uint8_t { NOTHING, PART, WHOLE };

// Returns the number of rows to capture for a decision's fraction: all or none if the output does not split by rows.
inline int64_t rows_taken(double fraction, int64_t rows, bool splits) {
  if (!splits) {
    return fraction >= 0.5 ? rows : 0;
  }
  return std::llrint(fraction * static_cast<double>(rows));
}

// Returns an action for each operator, decided from the last operator to the first. If a storage that an operator makes
// or writes to is needed, the pass substitutes the operator's captured rows, or runs the operator if it has none. If
// not all rows are captured, the pass computes the rest, and so needs the storages that the operator reads.
//
// `operators`: has these members, where `i` is an operator's index.
//
//   size()                returns the number of operators, in program order
//   is_left_out(i)        returns whether a pass always skips the operator
//   always_runs(i)        returns whether it runs even if its outputs are not needed; ignored if they are captured
//   taken(i)              returns how many rows of its outputs are captured
//   each_read(i, f)       calls `f(storage)` for each storage that it reads
//   each_changed(i, f)    calls `f(storage)` for each storage that it makes or writes to
//   each_made(i, f)       calls `f(storage)` for each storage that it makes or fills whole: if all rows are captured, a
//                         pass needs no earlier operator for this storage
//
// `needed`: for each storage, whether backward asks for it.
template <typename Operators>
std::vector<Action> actions_for(const Operators& operators, std::vector<bool> needed) {
  std::vector<Action> actions(operators.size(), Action::SKIP);
  for (size_t index = operators.size(); index-- > 0;) {
    if (operators.is_left_out(index)) {
      continue;
    }
    bool asked = false;
    operators.each_changed(index, [&](int32_t storage) { asked = asked || needed[storage]; });
    const Taken taken = operators.taken(index);
    if (taken != Taken::NOTHING && asked) {
      actions[index] = Action::SUBSTITUTE;
    } else if (taken == Taken::NOTHING && (asked || operators.always_runs(index))) {
      actions[index] = Action::RUN;
    }
    if (taken == Taken::WHOLE) {
      operators.each_made(index, [&](int32_t storage) { needed[storage] = false; });
    } else if (actions[index] != Action::SKIP) {
      operators.each_read(index, [&](int32_t storage) { needed[storage] = true; });
    }
  }
  return actions;
}

} // namespace memplug
