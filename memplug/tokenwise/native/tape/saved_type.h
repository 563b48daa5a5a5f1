// The object that autograd holds for a saved tensor, and the hooks that pack and unpack it. They are C functions, since
// they run once for each saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "frame.h"
#include "python_tensors.h"

namespace memplug {

// Returns autograd's pack hook for one frame.
pybind11::object pack_hook(const std::shared_ptr<Frame>& frame);

// Returns autograd's unpack hook, the same for all frames.
pybind11::object unpack_hook();

// Returns a tensor's class if that is a subclass without a dispatch of its own; else null.
pybind11::object type_of(pybind11::handle tensor);

// Returns the tensor as an object of class `type`, or as a plain tensor if that is null.
pybind11::object wrapped_as(const pybind11::object& type, const at::Tensor& tensor);

// Returns whether a tensor is a parameter of a module. Takes Python's lock.
bool is_parameter(const at::Tensor& tensor);

} // namespace memplug
