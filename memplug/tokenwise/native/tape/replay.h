// The recompute pass: the operators of a tape that restoring needs, run again below autograd.
#pragma once

#include <functional>
#include <stdexcept>
#include <vector>

#include "decisions.h"
#include "forward.h"

namespace memplug {

// The captured results of an operator, in the order of its tensors; `rows` of the first are there, of all if it is -1.
struct Substitute {
  std::vector<at::Tensor> tensors;
  int64_t rows = -1;
};

// A recompute pass that ran otherwise than its forward.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A recompute pass launches a collective again, by that name, whose process group is gone.
struct GroupGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory that a pass finds there, by storage; undefined where it has to be made.
using Bases = std::vector<at::Tensor>;

// What a recompute pass asks of others.
struct Helpers {
  std::function<Substitute(size_t)> substitute; // the captured results of an operator

  // Runs a unit again, the operator of that index, with these tensors, outside of all guards of the pass. Returns what its
  // parts made, those that `needed` says.
  std::function<std::vector<at::Tensor>(size_t, const std::vector<at::Tensor>&, const std::vector<bool>& needed)> run_unit;
};

// Runs a tape's operators by those actions and returns the tensors that lie where `wanted` says, without their graph.
//
// Views are not run: each tensor is made from its storage. A storage is released after its last use. Random operators
// draw what they drew, and the generators are as before afterwards. Throws `Diverged` and `GroupGone`.
std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    Bases bases,
    const std::vector<std::vector<Drawn>>& drawn,
    const std::vector<const Use*>& wanted,
    const Helpers& helpers);

// The tensor that lies so in a storage, of which `base` is any tensor.
at::Tensor tensor_at(const at::Tensor& base, const Geometry& geometry);

// The same, always another tensor than the base.
at::Tensor alias_at(const at::Tensor& base, const Geometry& geometry);

} // namespace memplug
