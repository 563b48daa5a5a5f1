// The recompute pass: runs, below autograd, those operators of a tape that are needed to restore its saved tensors.
#pragma once

#include <functional>
#include <stdexcept>
#include <vector>

#include "decisions.h"
#include "forward.h"

namespace memplug {

// The captured results of an operator, in order. `rows`: number of valid rows of the first tensor; -1 for all.
struct Substitute {
  std::vector<at::Tensor> tensors;
  int64_t rows = -1;
};

// Thrown if a recompute pass runs differently from its forward.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown if a recompute pass has to launch a collective whose process group is gone. `what()` names the collective.
struct GroupGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For each storage, a tensor in its memory; undefined if the pass itself has to make that memory.
using Bases = std::vector<at::Tensor>;

// Functions that a recompute pass calls.
struct Helpers {
  std::function<Substitute(size_t)> substitute; // returns the captured results of the operator at an index

  // Runs the unit at an index again on these input tensors, under the dispatch keys of the code that called `replay`.
  // Returns a tensor for each of the unit's parts; undefined where `needed` is false.
  std::function<std::vector<at::Tensor>(size_t, const std::vector<at::Tensor>&, const std::vector<bool>& needed)> run_unit;
};

// Runs a tape's operators by `actions`. Returns the tensors that `wanted` describes, without their graph.
//
// Does not run operators that make views: it makes each view from its storage. Releases a storage after its last use.
// Operators draw the same random numbers as in the forward, from the states in `drawn`; afterwards the generators have
// their states from before the pass again. Throws `Diverged` and `GroupGone`.
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
