// Visits the tensors of an operator's arguments and results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace memplug {

// Returns whether a tensor is a Python number that torch has wrapped in a tensor.
inline bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Calls `visit(tensor)` for each defined tensor of an argument or result, including wrapped numbers and tensors in
// lists.
template <typename Visit>
void each_tensor_or_number(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      each_tensor_or_number(element, visit);
    }
  }
}

// Calls `visit(tensor)` for each defined tensor of an argument or result, except wrapped numbers.
template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  each_tensor_or_number(value, [&](const at::Tensor& tensor) {
    if (!is_number(tensor)) {
      visit(tensor);
    }
  });
}

} // namespace memplug
