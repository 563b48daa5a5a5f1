// What autograd holds of a saved tensor, and the two hooks around it, as C functions: they run once a saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "frame.h"

namespace memplug {

// Autograd's pack hook of one frame; `python` is the object that runs its recompute pass, and lives as long as what the
// hook returns.
pybind11::object pack_hook(std::shared_ptr<Frame> frame, pybind11::handle python);

// Autograd's unpack hook of all frames. Calls `python.restore()` for what has to be recomputed.
pybind11::object unpack_hook();

// Autograd's tensor as an object of Python.
pybind11::object wrapped(const at::Tensor& tensor);

// The tensor of an object of Python; throws `TypeError` for another one.
const at::Tensor& tensor_of(pybind11::handle object);

// Whether a tensor is a parameter of a module; takes the lock of Python.
bool is_parameter(const at::Tensor& tensor);

} // namespace memplug
