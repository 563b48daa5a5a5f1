// A unit: a call inside of a region's forward whose kernels no operator shows, and which can run again by itself. On
// the tape it is an operator that reads its input tensors and makes a token. Each memory that it made, and returned or
// saved for backward, is an operator of its own that reads the token:
//
//     memplug::unit(input, ...) -> token   memplug::of_unit(token, 0) -> saved   memplug::of_unit(token, 1) -> returned
//
// A unit that writes to its inputs, as kernels of a rotary embedding do, is memplug::unit_, an in-place operator.
//
// So a plan can keep, swap or recompute each of these tensors. The unit runs again if one has to be recomputed.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "ambient.h"
#include "arguments.h"
#include "operators.h"
#include "source.h"

namespace memplug {

// One call of a unit, as its frame keeps it. Guarded by Python's lock.
struct __attribute__((visibility("hidden"))) UnitCall {
  pybind11::object unit; // a memplug.tokenwise.engine.units.Unit
  pybind11::object call; // the callable that ran
  pybind11::object state; // needed to run it again as it ran
  pybind11::object surroundings; // as for a region, see `Running::run`
  Ambient ambient;
  bool with_gradients; // gradients were enabled
  Containers arguments = {}, keywords = {};
  std::vector<pybind11::object> values = {}; // values in the containers; null for tensors of the tape
  // for these tensors; `written`: by the unit, according to its operator
  std::vector<bool> requires_grad = {}, written = {};
  std::vector<pybind11::object> types = {}; // the classes of these tensors, from `type_of`
  std::vector<at::Tensor> parameters = {}; // among the values, and of its module
  std::vector<uint32_t> versions = {}; // of these
  std::vector<Source> parts = {};
  size_t saved = 0; // number of tensors that it saved
};

// Return the operator of a unit, and of its parts, by the overload that names the kind. `writes`: the unit writes to
// its inputs.
const Operator& unit_operator(const std::string& overload, bool writes);
const Operator& part_operator(const std::string& overload);

// Returns the same memory as a non-leaf of a graph that never runs, since autograd forbids writes to leaves.
at::Tensor no_leaf_at(const at::Tensor& memory);

// Returns each tensor's count of writes.
std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors);

// Returns the tensors among a unit's arguments or results, in order, that a tape can describe.
std::vector<at::Tensor> tensors_in(pybind11::handle returned);

} // namespace memplug
