// Rules that the core and the planner share. Plain C++: the planner knows no torch (memplug/tokenwise/plan/rules.py).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

// What a recompute pass does with an operator; as `Action` in tests/support/reference_tape.py.
enum class Action : uint8_t { RUN, SUBSTITUTE, SKIP };

// What of an operator's outputs is captured: with all rows of them its inputs are not needed.
enum class Taken : uint8_t { NOTHING, PART, WHOLE };

// How many rows of an output a fraction of them is. One that does not split is captured with all of its rows, or not.
inline int64_t rows_taken(double fraction, int64_t rows, bool splits) {
  if (!splits) {
    return fraction >= 0.5 ? rows : 0;
  }
  return std::llrint(fraction * static_cast<double>(rows));
}

// Which operators a recompute pass runs: from reader to maker, those whose outputs are needed and not captured. Each member
// of `operators` takes an operator's index.
//
//   size()             how many there are, in program order
//   is_left_out(i)     it neither runs nor is substituted, whatever is needed
//   always_runs(i)     it runs whether or not its outputs are needed, unless they are captured
//   taken(i)           what of its outputs is captured
//   each_read(i, f), each_changed(i, f), each_made(i, f)
//                      calls `f(storage)` for what it reads; what it makes or writes to; what no earlier one is needed for
//                      once all of it is captured
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
