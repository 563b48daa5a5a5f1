// What autograd holds of a saved tensor, and the two hooks around it, as C functions: they run once a saved tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "forward.h"

namespace memplug {

// Autograd's pack hook of one forward; `frame` is who restores what cannot be had from the forward alone.
pybind11::object pack_hook(std::shared_ptr<Forward> forward, pybind11::handle frame);

// Autograd's unpack hook of all forwards. Calls `frame.unpack(index)` for what has to be fetched or recomputed.
pybind11::object unpack_hook();

// Autograd's tensor as an object of Python.
pybind11::object wrapped(const at::Tensor& tensor);

// The tensor of an object of Python; throws `TypeError` for another one.
const at::Tensor& tensor_of(pybind11::handle object);

// Whether a tensor is a parameter of a module; takes the lock of Python.
bool is_parameter(const at::Tensor& tensor);

} // namespace memplug
