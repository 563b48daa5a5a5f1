// The parts of torch's libraries that memplug's C++ uses and torch may change. Parts of torch/csrc are in
// torch_private_csrc.h, those of c10d in exchange.cpp, and those of the CUDA allocator in hands_on.h, cuda_front.cpp,
// cuda_allocator.cpp and cuda_device.cpp. For Python, memplug/torch_private.py has the private names, and the versions
// of torch that memplug knows.
//
// No other file of the core includes the headers below. If torch has moved a name, the build fails in this file, and
// memplug's error quotes the line.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>

#if __has_include(<c10/core/StorageMaterializer.h>)
#define MEMPLUG_SWAPS_STORAGES // torch >= 2.13
#endif

namespace memplug {

// -- observed operators, and a thread's state while they run --

#ifndef NDEBUG
#error "at::RecordFunction has another layout without NDEBUG, which torch is built with"
#endif
static_assert(
    std::is_same_v<decltype(std::declval<const at::RecordFunction&>().name()), const char*>,
    "at::RecordFunction::name is not a pointer, so it cannot identify operators");
static_assert(
    std::is_convertible_v<
        decltype(std::declval<const at::RecordFunction&>().inputs()),
        c10::ArrayRef<const c10::IValue>>,
    "at::RecordFunction::inputs are not boxed arguments, which regions need");

using DispatchModes = c10::impl::TorchDispatchModeTLS;
using DispatchMode = c10::impl::PyObject_TorchDispatchMode;
using FunctionModes = at::impl::PythonTorchFunctionTLS;
static_assert(
    std::is_copy_constructible_v<DispatchModes> && std::is_copy_constructible_v<FunctionModes>,
    "stacks of modes cannot be set aside, as a recompute pass needs");

using LocalKeys = c10::impl::LocalDispatchKeySet;
using ForcedKeys = c10::impl::ForceDispatchKeyGuard;

inline LocalKeys local_keys() {
  return c10::impl::tls_local_dispatch_key_set();
}

// Returns whether the thread has a stack of function transforms, even an empty one. Reading the stack itself would make
// one, which torch then copies for every node that autograd makes on the thread.
inline bool has_transform_stack() {
  return at::functorch::functorchTLSAccessor() != nullptr;
}

// Returns the number of nodes that autograd has made on this thread.
inline uint64_t nodes_made() {
  return at::sequence_number::peek();
}

// Makes torch notice, on this thread, callbacks that were added or removed.
inline void update_callbacks() {
  (void)at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// -- tensors and storages --

inline const c10::VariableVersion& version_counter_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter();
}

// torch cannot compare version counters. But a counter holds only a pointer to its count, and pointers can be compared.
inline bool is_same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) {
  static_assert(sizeof(one) == sizeof(void*), "c10::VariableVersion holds more than a pointer, and cannot be compared");
  return std::memcmp(&one, &other, sizeof(one)) == 0;
}

// Returns another tensor of the storage of `base`; the caller sets the new tensor's sizes and strides.
inline at::Tensor of_same_storage(const at::Tensor& base, c10::DispatchKeySet keys, c10::ScalarType dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, c10::scalarTypeToTypeMeta(dtype));
}

inline void share_versions(const at::Tensor& tensor, const at::Tensor& base) {
  tensor.unsafeGetTensorImpl()->set_version_counter(version_counter_of(base));
}

// Returns a tensor with the same memory, sizes, strides and version counter, but without the graph.
inline at::Tensor detached(const at::Tensor& tensor) {
  auto alias = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(version_counter_of(tensor), false);
  alias->set_allow_tensor_metadata_change(true);
  return at::Tensor(std::move(alias));
}

inline void set_lazy_bits(const at::Tensor& tensor, bool conj, bool neg) {
  tensor._set_conj(conj);
  tensor._set_neg(neg);
}

// Returns the data pointer without the checks by which torch notices a write.
inline c10::DataPtr& pointer_of(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks();
}

#ifdef MEMPLUG_SWAPS_STORAGES
static_assert(
    requires(c10::StorageImpl& storage, void (*before_write)(c10::StorageImpl*)) {
      storage.set_materializer(before_write);
      { storage.has_materializer() } -> std::same_as<bool>;
    },
    "c10::StorageImpl no longer announces writes, so swapped tensors cannot return in time");
#endif

// -- Python names that memplug/torch_private.py checks --

inline constexpr const char* AUTOGRAD = "torch._C._autograd";
inline constexpr const char* PUSH_HOOKS = "_push_saved_tensors_default_hooks";
inline constexpr const char* POP_HOOKS = "_pop_saved_tensors_default_hooks";
inline constexpr const char* COMPILER = "torch._dynamo.eval_frame";
inline constexpr const char* STANCE = "_stance";
inline constexpr const char* STANCE_CLASS = "DynamoStance";

} // namespace memplug
