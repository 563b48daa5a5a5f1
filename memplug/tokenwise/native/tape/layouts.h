// Tensors whose elements no storage and geometry tell of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace memplug {

// A function transform (torch.func) has wrapped it: operators that run on what is inside show what happens.
inline bool is_wrapped(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  return tensor.key_set().has_any(
      c10::DispatchKeySet({Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Batched, Key::Functionalize}));
}

// Sparse, nested, quantized, or in a layout of a library's own. A subclass that dispatches for itself never is.
inline bool is_irregular(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(Key::Python) || is_wrapped(tensor)) {
    return false;
  }
  return !tensor.has_storage() || keys.has(Key::Quantized) || keys.has(Key::NestedTensor) || keys.has(Key::Sparse) ||
      keys.has(Key::SparseCsr);
}

// Memory that a tape can name.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) && !is_wrapped(tensor) &&
      !is_irregular(tensor);
}

// Bytes of its elements, and of their indices where it is sparse.
int64_t memory_bytes(const at::Tensor& tensor);

} // namespace memplug
