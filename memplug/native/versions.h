// How often a tensor was written to in place, as autograd counts it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace memplug {

// 0 of a tensor made in inference mode, which has no count.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// As messages say it; a nested tensor has none.
inline std::string shape_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? "nested" : c10::str(tensor.sizes());
}

// An error, as autograd raises one: backward needs the tensor as it was then. `what` it is: "input of a region".
inline void check_version(const at::Tensor& tensor, uint32_t expected, const char* what) {
  TORCH_CHECK(
      version_of(tensor) == expected,
      "one of the variables needed for gradient computation has been modified by an inplace operation: a ",
      shape_of(tensor),
      " ",
      what,
      " is at version ",
      version_of(tensor),
      "; expected version ",
      expected);
}

} // namespace memplug
