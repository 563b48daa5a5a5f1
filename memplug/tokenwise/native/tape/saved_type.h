// What autograd holds of a saved tensor, and the two hooks around it, as C functions: they run once a saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "frame.h"
#include "python_tensors.h"

namespace memplug {

// Autograd's pack hook of one frame.
pybind11::object pack_hook(const std::shared_ptr<Frame>& frame);

// Autograd's unpack hook of all frames.
pybind11::object unpack_hook();

// Its class, where that is a subclass of a tensor's that does not dispatch for itself; else null.
pybind11::object type_of(pybind11::handle tensor);

// The same as an object of that class, unless it is null.
pybind11::object wrapped_as(const pybind11::object& type, const at::Tensor& tensor);

// Whether a tensor is a parameter of a module; takes the lock of Python.
bool is_parameter(const at::Tensor& tensor);

} // namespace memplug
