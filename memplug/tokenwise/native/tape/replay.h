// The recompute pass: runs the operators that restoring needs, below autograd.
#pragma once

#include <functional>
#include <stdexcept>
#include <vector>

#include "decisions.h"
#include "forward.h"

namespace memplug {

// The captured results of an operator, in the order of its tensors. `rows`: how many rows the first one has; -1: all.
struct Substitute {
  std::vector<at::Tensor> tensors;
  int64_t rows = -1;
};

// Thrown if a recompute pass runs differently from its forward.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown if a recompute pass has to launch a collective, whose name it carries, and the process group is gone.
struct GroupGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory that exists before a pass, by storage; undefined if the pass has to make it.
using Bases = std::vector<at::Tensor>;

// Functions that a recompute pass calls.
struct Helpers {
  std::function<Substitute(size_t)> substitute; // returns the captured results of an operator

  // Runs the unit at an index again with these tensors, outside of all guards of the pass. Returns its parts; undefined
  // where `needed` is false.
  std::function<std::vector<at::Tensor>(size_t, const std::vector<at::Tensor>&, const std::vector<bool>& needed)> run_unit;
};

// Runs a tape's operators by `actions`. Returns the tensors that `wanted` describes, without their graph.
//
// Views are not run: each tensor is made from its storage. A storage is released after its last use. Random operators
// draw the same numbers as before, and the generators are restored afterwards. Throws `Diverged` and `GroupGone`.
std::vector<at::Tensor> replay(
    const Tape& tape,
    const std::vector<Action>& actions,
    Bases bases,
    const std::vector<std::vector<GeneratorDraw>>& drawn,
    const std::vector<const Use*>& wanted,
    const Helpers& helpers);

// Returns the tensor with this geometry in the storage of `base`.
at::Tensor tensor_at(const at::Tensor& base, const Geometry& geometry);

// Returns the tensor with this geometry in the storage of `base`, never `base` itself.
at::Tensor alias_at(const at::Tensor& base, const Geometry& geometry);

} // namespace memplug
