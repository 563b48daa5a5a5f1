// Rules that the core and the planner share. In plain C++, since the planner knows no torch
// (memplug/tokenwise/plan/rules.py).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

// A recompute pass's action on an operator; as `Action` in tests/support/reference_tape.py.
enum class Action : uint8_t { RUN, SUBSTITUTE, SKIP };

// How much of an operator's outputs is captured. With all of their rows, its inputs are not needed.
enum class Taken : uint8_t { NOTHING, PART, WHOLE };

// Returns the number of rows in a fraction of an output's rows. An output that does not split is captured whole or not
// at all.
inline int64_t rows_taken(double fraction, int64_t rows, bool splits) {
  if (!splits) {
    return fraction >= 0.5 ? rows : 0;
  }
  return std::llrint(fraction * static_cast<double>(rows));
}

// Returns an action for each operator. The scan goes from readers to makers: an operator runs if its outputs are needed
// and not captured. Each member of `operators` takes an operator's index.
//
//   size()                number of operators, in program order
//   is_left_out(i)        it neither runs nor is substituted, whatever is needed
//   always_runs(i)        it runs whether or not its outputs are needed, unless they are captured
//   taken(i)              how much of its outputs is captured
//   each_read(i, f)       calls `f(storage)` for each storage that it reads,
//   each_changed(i, f)    for each that it makes or writes to,
//   each_made(i, f)       and for each that needs no earlier operator once all of it is captured
//
// `needed`: by storage, whether backward asks for it.
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
