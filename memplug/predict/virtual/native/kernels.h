// Operators of the virtual device, and those for which torch's choice of kernels depends on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "device.h"

namespace memplug {

bool is_virtual(const at::Tensor& tensor);
TensorShape shape_of(const at::Tensor& tensor);

// Of a virtual tensor one of the same layout on torch's meta device, and the other way round.
at::Tensor on_meta(const at::Tensor& tensor);
at::Tensor like(const at::Tensor& meta);

void register_kernels(torch::Library& aten);
void register_attention(torch::Library& aten, torch::Library& autograd);
void register_chosen(torch::Library& aten);
void register_autocast();

} // namespace memplug
