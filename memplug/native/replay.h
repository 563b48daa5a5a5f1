// The recompute pass: the operators of a tape that restoring needs, run again below autograd.
#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "tape.h"

namespace memplug {

// As `Action` in memplug/execute/tape.py.
enum class Action : uint8_t { RUN, SUBSTITUTE, SKIP };

// The captured results of an operator, in the order of its tensors; `rows` of the first are there, of all if it is -1.
struct Substitute {
  std::vector<at::Tensor> tensors;
  int64_t rows = -1;
};

// What a recompute pass does with each operator.
//
// `captured`: whether all rows of an operator's results are captured, so that its inputs are not needed; by index.
// `wanted`: storages that it is to restore.
std::vector<Action> actions_of(
    const Tape& tape, const std::unordered_map<size_t, bool>& captured, const std::vector<int32_t>& wanted);

// Runs a tape's operators by those actions and returns the tensors that lie where `wanted` says, without their graph.
//
// Views are not run: each tensor is made from its storage. A storage is released after its last use. Random operators
// draw the same numbers again, and the generators are as before afterwards.
std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    const std::vector<Use>& wanted,
    const std::function<Substitute(size_t)>& substitute);

} // namespace memplug
