// Tells tensors that a tape can describe by a storage and a geometry (size, stride, offset) from other tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace memplug {

// Returns whether a function transform (torch.func) has wrapped a tensor. Only operators on the inner tensor touch
// memory.
inline bool is_wrapped(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  return tensor.key_set().has_any(
      c10::DispatchKeySet({Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Batched, Key::Functionalize}));
}

// Returns whether a tensor is sparse, nested, quantized, or in a library's own layout. False for a subclass with its
// own `__torch_dispatch__`, and for a wrapped tensor.
inline bool is_irregular(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(Key::Python) || is_wrapped(tensor)) {
    return false;
  }
  return !tensor.has_storage() || keys.has(Key::Quantized) || keys.has(Key::NestedTensor) || keys.has(Key::Sparse) ||
      keys.has(Key::SparseCsr);
}

// Returns whether a tape can describe a tensor by a storage and a geometry.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) && !is_wrapped(tensor) &&
      !is_irregular(tensor);
}

// Returns a tensor's bytes, including the indices of a sparse tensor.
int64_t memory_bytes(const at::Tensor& tensor);

} // namespace memplug
