// A unit: a call inside of a region's forward whose kernels no operator shows, and which can be run again by itself. On
// the tape it is an operator that reads the tensors it was given and makes a token; each memory that it made, and
// returned or saved for backward, is an operator of its own that reads the token:
//
//     memplug::unit(input, ...) -> token     memplug::of_unit(token, 0) -> saved     memplug::of_unit(token, 1) -> returned
//
// One that writes to what it is given, as kernels of a rotary embedding do, is memplug::unit_: an operator in place.
//
// So a plan keeps, swaps or recomputes each of them, and the unit runs again where one of them has to be recomputed.
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
  pybind11::object call; // what ran
  pybind11::object state; // what it needs to run again as it ran
  pybind11::object surroundings; // as a region's
  Ambient ambient;
  bool with_gradients; // were enabled
  Containers arguments = {}, keywords = {};
  std::vector<pybind11::object> values = {}; // of those: null where it is a tensor of the tape
  std::vector<bool> requires_grad = {}, written = {}; // of these tensors: `written` by the unit, as its operator says
  std::vector<pybind11::object> types = {}; // likewise, see `type_of`
  std::vector<at::Tensor> parameters = {}; // among the values, and of its module
  std::vector<uint32_t> versions = {}; // of these
  std::vector<Source> parts = {};
  size_t saved = 0; // how many tensors it saved
};

// The operator of a unit, and of its parts, by the overload that says of what kind it is. `writes`: to what it is given.
const Operator& unit_operator(const std::string& overload, bool writes);
const Operator& part_operator(const std::string& overload);

// The same memory in a graph that is never run: autograd forbids to write to leaves.
at::Tensor no_leaf_at(const at::Tensor& memory);

// Of each, how often it was written to.
std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors);

// Of what a unit was given or returned, in order: memory that a tape can name.
std::vector<at::Tensor> tensors_in(pybind11::handle returned);

} // namespace memplug
