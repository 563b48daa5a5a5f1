// Makes tensors over existing memory, without operators.
#pragma once

#include <ATen/ops/from_blob.h>

#include "torch_private.h"

namespace memplug {

// Returns a view of part of the storage of `base`, read as `dtype`, with the version counter of `base`. `offset` is in
// elements.
inline at::Tensor view_of(
    const at::Tensor& base, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset, at::ScalarType dtype, bool conj, bool neg) {
  constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  at::Tensor tensor = of_same_storage(base, base.key_set() - lazy, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  if (!tensor.is_inference() && !base.is_inference()) { // a tensor made in inference mode has no version counter
    share_versions(tensor, base);
  }
  set_lazy_bits(tensor, conj, neg);
  return tensor;
}

// Returns memory as a tensor of bytes. The tensor does not keep the memory alive.
inline at::Tensor bytes_at(const void* memory, int64_t nbytes, c10::Device device) {
  return at::from_blob(const_cast<void*>(memory), {nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

} // namespace memplug
