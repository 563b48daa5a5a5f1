// How often a tensor was written to in place, as autograd counts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "torch_private.h"

namespace memplug {

// 0 of a tensor made in inference mode, which has no count.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// As messages say it; a nested tensor has none.
inline std::string shape_of(const at::Tensor& tensor) {
  return tensor.is_nested() ? "nested" : c10::str(tensor.sizes());
}

constexpr const char* kWrittenInPlace =
    "one of the variables needed for gradient computation has been modified by an inplace operation";

// An error, as autograd raises one: backward needs the tensor as it was then. `what` it is: "input of a region".
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

// Memory that a forward read has a count of writes for each tensor that is no view of another: parameters in a flat buffer
// have one each.
struct Count {
  Count(const at::Tensor& tensor, size_t met, bool in_unit)
      : counter(version_counter_of(tensor)), first(tensor.getIntrusivePtr()), met(met), in_unit(in_unit) {}

  // Whether it is that of a tensor.
  bool is_of(const at::Tensor& tensor) const {
    return is_same_counter(counter, version_counter_of(tensor));
  }

  void close() {
    version = counter.enabled() ? counter.current_version() : 0;
  }

  bool has_changed() const {
    return counter.enabled() && counter.current_version() != version;
  }

  // Throws what autograd would.
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
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> first; // that was met, for the message
  size_t met; // how many operators had begun then, with the one that it was given to
  bool in_unit; // a unit alone reads it
  uint32_t version = 0; // when the forward was over
};

} // namespace memplug
