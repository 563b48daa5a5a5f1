// The recompute pass: the operators of a tape that restoring needs, run again below autograd.
#pragma once

#include <functional>
#include <stdexcept>
#include <vector>

#include "forward.h"

namespace memplug {

// As `Action` in memplug/execute/tape.py.
enum class Action : uint8_t { RUN, SUBSTITUTE, SKIP };

// What of an operator's results is captured: `whole` where all rows of them are, so that its inputs are not needed.
struct Captured {
  size_t index;
  bool whole;
};

// The captured results of an operator, in the order of its tensors; `rows` of the first are there, of all if it is -1.
struct Substitute {
  std::vector<at::Tensor> tensors;
  int64_t rows = -1;
};

// A recompute pass that ran otherwise than its forward.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a recompute pass does with each operator.
//
// `launches`: operators whose result another one's capture gives.
// `wanted`: storages that it is to restore.
std::vector<Action> actions_of(
    const Tape& tape,
    const std::vector<Captured>& captured,
    const std::vector<size_t>& launches,
    const std::vector<int32_t>& wanted);

// Whether a pass by those actions calls operators that other ranks take part in.
bool communicates(const Tape& tape, const std::vector<Action>& actions);

// Memory that a pass finds there, by storage; undefined where it has to be made.
using Bases = std::vector<at::Tensor>;

// Storages that are there before the pass, and that it or `wanted` reads.
std::vector<int32_t> read_by(const Tape& tape, const std::vector<Action>& actions, const std::vector<Use>& wanted);

// Runs a tape's operators by those actions and returns the tensors that lie where `wanted` says, without their graph.
//
// Views are not run: each tensor is made from its storage. A storage is released after its last use. Random operators
// draw what they drew, and the generators are as before afterwards. Throws `Diverged`.
std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    Bases bases,
    const std::vector<std::vector<Drawn>>& drawn,
    const std::vector<Use>& wanted,
    const std::function<Substitute(size_t)>& substitute);

// The tensor that lies so in a storage, of which `base` is any tensor.
at::Tensor tensor_at(const at::Tensor& base, const Geometry& geometry);

// The same, always another tensor than the base.
at::Tensor alias_at(const at::Tensor& base, const Geometry& geometry);

} // namespace memplug
