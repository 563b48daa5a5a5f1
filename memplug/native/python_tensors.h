// Converts tensors to and from Python objects.
#pragma once

#include <pybind11/pybind11.h>

#include "torch_private_csrc.h"

namespace memplug {

// Returns a tensor as a Python object.
inline pybind11::object wrapped(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

// Returns the tensor of a Python object; throws `TypeError` if the object is not a tensor.
inline const at::Tensor& tensor_of(pybind11::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw pybind11::type_error("a tensor is needed");
  }
  return THPVariable_Unpack(object.ptr());
}

} // namespace memplug
