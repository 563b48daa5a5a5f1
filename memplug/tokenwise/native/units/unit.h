// A unit: a call inside of a region's forward whose kernels no operator shows, and which can run again by itself. On
// the tape the call is an operator that reads the unit's input tensors and makes a token, an empty tensor. Each memory
// that the call made, and either returned or saved for backward, is a part of the unit: the output of a further
// operator, which reads the token.
//
//     memplug::unit(input, ...) -> token   memplug::of_unit(token, 0) -> saved   memplug::of_unit(token, 1) -> returned
//
// A unit that writes to its inputs, as kernels of a rotary embedding do, is the in-place operator memplug::unit_.
//
// A plan can keep, swap or recompute each part. If a part has to be recomputed, the unit runs again.
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
  pybind11::object state; // the Python state in which the unit ran, to run it again in
  pybind11::object surroundings; // see `Running::run`
  Ambient ambient;
  bool with_gradients; // gradients were enabled during the call
  Containers arguments = {}, keywords = {};
  // the values in the containers, in order; null for the unit's input tensors
  std::vector<pybind11::object> values = {};
  // for each input tensor, whether it required a gradient, and whether the unit's operator writes to it
  std::vector<bool> requires_grad = {}, written = {};
  std::vector<pybind11::object> types = {}; // for each input tensor, its class, from `type_of`
  std::vector<at::Tensor> parameters = {}; // parameters among the values, and other parameters that the unit reads
  std::vector<uint32_t> versions = {}; // for each parameter, its version
  std::vector<Source> parts = {}; // the source of each part
  size_t saved = 0; // number of tensors that the unit saved
};

// Returns the operator that stands for a unit. `overload`: the kind of the unit's parts, as in `part_operator`.
// `writes`: the unit writes to its inputs.
const Operator& unit_operator(const std::string& overload, bool writes);

// Returns the operator that stands for a part of a unit. `overload`: the kind of the part, such as "rows".
const Operator& part_operator(const std::string& overload);

// Returns a non-leaf tensor in the same memory, since autograd forbids in-place writes to leaves. The graph behind it
// never runs.
at::Tensor no_leaf_at(const at::Tensor& memory);

std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors);

// Returns the tensors among a call's arguments or results that a tape can describe, in order.
std::vector<at::Tensor> tensors_in(pybind11::handle returned);

} // namespace memplug
