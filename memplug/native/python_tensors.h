// Tensors as objects of Python.
#pragma once

#include <pybind11/pybind11.h>

#include "torch_private_csrc.h"

namespace memplug {

// Autograd's tensor as an object of Python.
inline pybind11::object wrapped(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

// The tensor of an object of Python; throws `TypeError` for another one.
inline const at::Tensor& tensor_of(pybind11::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw pybind11::type_error("a tensor is needed");
  }
  return THPVariable_Unpack(object.ptr());
}

} // namespace memplug
