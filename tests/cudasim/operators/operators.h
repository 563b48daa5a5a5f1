// An operator of the simulated device: the CPU's kernel over the same memory, queued on the current stream.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../runtime/cudasim.h"

namespace cudasim {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

// The part of the CUDA generator's numbers that one random operator draws: the operator can draw it again later.
struct Draw {
  uint64_t seed = 0, offset = 0;
  at::Generator generator() const; // a CPU generator; equal draws give equal generators
};

// Computes the results of an operator from arguments whose tensors are CPU tensors.
using Compute = std::function<Stack(const c10::OperatorHandle&, Stack, Draw)>;

// The facts in an operator's schema that the simulation needs.
struct Info {
  std::string name;
  std::vector<bool> written; // by argument: whether the operator writes to it
  std::vector<bool> out;     // by argument: whether the operator writes to it and does not read it
  std::vector<int> alias;    // by result: the argument that it aliases; -1: a new tensor
  int generator = -1;        // the argument that is a generator; -1: none
  int dropout = -1;          // the argument that is the dropout probability; -1: none
  bool draws = false;
  bool convolves = false;
  bool only_in_place = false;
  bool tensors_only = true; // whether all results are tensors
  Compute compute;          // used if the CPU has no kernel
};

// Returns the facts on an operator that is simulated.
const Info& info_of(const c10::OperatorHandle& op);

// Return the operators that the CPU has no kernel for, by name.
std::map<std::string, Compute> attention_operators();
std::map<std::string, Compute> other_operators();

// Sets `metas` to the results on the meta device; returns false if their shapes depend on the data.
bool infer(const c10::OperatorHandle& op, const Info& info, const Stack& arguments, Stack& metas);

// The boxed kernels that replace torch's.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
void call_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

// Hides the operators inside of a kernel from the modes, callbacks and autograd of the caller.
struct Quiet {
  at::RecordFunctionGuard unrecorded{false};
  c10::impl::ExcludeDispatchKeyGuard excluded{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks |
      c10::DispatchKeySet({c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher})};
};

// Returns the value with f(tensor) in place of each defined tensor.
template <typename F>
IValue map(const IValue& value, const F& f) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const Tensor& each : value.toTensorVector()) {
      result.push_back(each.defined() ? f(each) : each);
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
      result.push_back(each.has_value() && each->defined() ? std::optional<Tensor>(f(*each)) : each);
    }
    return result;
  }
  return value;
}

template <typename F>
void visit(const IValue& value, const F& f) {
  map(value, [&](const Tensor& each) {
    f(each);
    return each;
  });
}

// Marks `made` as a wrapped number if `of` is one: a wrapped number does not decide the type of a result.
inline void set_wrapped_as(const Tensor& made, const Tensor& of) {
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

// Returns the type that the CPU computes in.
inline at::ScalarType wide(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline Tensor tensor_at(const Stack& stack, size_t i) {
  return stack[i].isTensor() ? stack[i].toTensor() : Tensor();
}

} // namespace cudasim
