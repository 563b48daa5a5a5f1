// Helpers for the virtual device's operators, and functions that register each group of operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "device.h"

namespace memplug {

bool is_virtual(const at::Tensor& tensor);
TensorShape shape_of(const at::Tensor& tensor);

// Returns a meta tensor with the layout of a virtual tensor; returns any other tensor unchanged.
at::Tensor on_meta(const at::Tensor& tensor);
// Returns a new virtual tensor with the layout of a meta tensor.
at::Tensor like(const at::Tensor& meta);

void register_kernels(torch::Library& aten);
void register_attention(torch::Library& aten, torch::Library& autograd);
void register_chosen(torch::Library& aten);
void register_autocast();

} // namespace memplug
