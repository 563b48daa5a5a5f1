// Autograd's version counters, which count in-place writes to tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "torch_private.h"

namespace memplug {

// Returns a tensor's version; 0 for a tensor made in inference mode, which has none.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// Returns a tensor's shape for messages; "nested" for a nested tensor, which has none.
inline std::string shape_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? "nested" : c10::str(tensor.sizes());
}

constexpr const char* kWrittenInPlace =
    "one of the variables needed for gradient computation has been modified by an inplace operation";

// Throws an error like autograd's if a tensor's version is not `expected`. `what`: the tensor's role, such as "input of
// a region".
inline void check_version(const at::Tensor& tensor, uint32_t expected, const char* what) {
  TORCH_CHECK(
      version_of(tensor) == expected,
      kWrittenInPlace,
      ": a ",
      shape_of(tensor),
      " ",
      what,
      " is at version ",
      version_of(tensor),
      "; expected version ",
      expected);
}

// A version counter of memory that a forward read. Memory may have several: each tensor that is not a view of another
// has its own counter, as each parameter in a flat buffer has.
struct Count {
  Count(const at::Tensor& tensor, size_t met, bool in_unit)
      : counter(version_counter_of(tensor)), first(tensor.getIntrusivePtr()), met(met), in_unit(in_unit) {}

  // Returns whether this is the counter of `tensor`.
  bool is_of(const at::Tensor& tensor) const {
    return is_same_counter(counter, version_counter_of(tensor));
  }

  // Stores the counter's present value as `version`, at the end of the forward.
  void close() {
    version = counter.enabled() ? counter.current_version() : 0;
  }

  bool has_changed() const {
    return counter.enabled() && counter.current_version() != version;
  }

  // Throws an error like autograd's.
  [[noreturn]] void fail() const {
    const auto tensor = first.lock();
    TORCH_CHECK(
        false,
        kWrittenInPlace,
        ": a ",
        tensor.defined() ? shape_of(at::Tensor(tensor)) + " tensor" : "tensor",
        " that its region reads is at version ",
        counter.current_version(),
        "; expected version ",
        version);
  }

  c10::VariableVersion counter;
  // the first tensor with this counter that the forward met, for the message
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> first;
  size_t met; // number of operators begun when the forward met `first`, including the operator that reads it
  bool in_unit; // only a unit reads the tensor
  uint32_t version = 0; // the counter's value at the end of the forward
};

} // namespace memplug
