// The object that autograd holds in place of a saved tensor, and the hooks that pack and unpack tensors. The hooks are
// C functions, since they run for each saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "frame.h"
#include "python_tensors.h"

namespace memplug {

// Returns the pack hook for autograd to call while the frame's forward runs.
pybind11::object pack_hook(const std::shared_ptr<Frame>& frame);

// Returns the unpack hook for autograd, the same object for all frames.
pybind11::object unpack_hook();

// Returns a tensor's class if that is a subclass without its own `__torch_dispatch__`; else null.
pybind11::object type_of(pybind11::handle tensor);

// Returns the tensor as an object of class `type`, or as a plain tensor if `type` is null.
pybind11::object wrapped_as(const pybind11::object& type, const at::Tensor& tensor);

// Returns whether a tensor is a parameter of a module. Takes Python's lock.
bool is_parameter(const at::Tensor& tensor);

} // namespace memplug
