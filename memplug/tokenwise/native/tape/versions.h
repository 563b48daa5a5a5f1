// Counts of in-place writes to tensors, as autograd keeps them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "torch_private.h"

namespace memplug {

// Returns the count; 0 for a tensor made in inference mode, which has none.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// Returns the shape for messages; nested tensors have none.
inline std::string shape_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? "nested" : c10::str(tensor.sizes());
}

constexpr const char* kWrittenInPlace =
    "one of the variables needed for gradient computation has been modified by an inplace operation";

// Throws an error like autograd's if the tensor was written to since. `what`: the tensor's role, such as "input of a
// region".
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

// The count of writes to memory that a forward read. Each tensor that is no view of another has one: parameters in a
// flat buffer have one each.
struct Count {
  Count(const at::Tensor& tensor, size_t met, bool in_unit)
      : counter(version_counter_of(tensor)), first(tensor.getIntrusivePtr()), met(met), in_unit(in_unit) {}

  // Returns whether it counts the writes to `tensor`.
  bool is_of(const at::Tensor& tensor) const {
    return is_same_counter(counter, version_counter_of(tensor));
  }

  // Takes the count at the end of the forward.
  void close() {
    version = counter.enabled() ? counter.current_version() : 0;
  }

  bool has_changed() const {
    return counter.enabled() && counter.current_version() != version;
  }

  // Throws the error that autograd would raise.
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
  // the first tensor that was met, for the message
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> first;
  size_t met; // number of operators begun by then, including the one that reads it
  bool in_unit; // only a unit reads it
  uint32_t version = 0; // at the end of the forward
};

} // namespace memplug
