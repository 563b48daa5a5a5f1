// Operators that torch runs by different kernels on different devices. An RMS norm is one kernel, as on CUDA.
#include "kernels.h"

#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

namespace memplug {
namespace {

// -- norms and embeddings ---------------------------------------------------------------------------------------------------

at::Tensor rms_norm(
    const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  return std::get<0>(at::_fused_rms_norm(input, C10_AS_INTARRAYREF_SLOW(shape), weight, eps));
}

at::Tensor embed_backward(
    const at::Tensor& gradient, const at::Tensor& indices, c10::SymInt count, c10::SymInt, bool) {
  const at::DisableRecordFunctionGuard one;
  const at::Tensor dense = gradient.contiguous(); // a copy if needed, as in the kernels of CUDA and the CPU
  at::Tensor output = at::empty({count.guard_int(__FILE__, __LINE__), dense.size(-1)}, dense.options());
  VirtualDevice::get().run({"aten::embedding_dense_backward", {shape_of(dense), shape_of(indices)}, {shape_of(output)}});
  return output;
}

// -- grouped matmuls --------------------------------------------------------------------------------------------------------

// Runs one kernel, whose duration does not depend on how the rows are split into groups. CUDA has such a kernel only
// for bfloat16. For other dtypes torch's CUDA code loops over the groups; here they are one kernel too.
at::Tensor grouped_mm(
    const at::Tensor& left,
    const at::Tensor& right,
    const std::optional<at::Tensor>& ends,
    const std::optional<at::Tensor>& bias,
    std::optional<at::ScalarType> dtype) {
  const at::DisableRecordFunctionGuard one;
  at::Tensor output;
  Work work{"aten::_grouped_mm", {shape_of(left), shape_of(right)}, {}};
  // torch's meta kernel is for bfloat16; in CUDA builds it also aligns the output's rows, as CUDA's kernel does
  if (left.scalar_type() == at::kBFloat16) {
    const std::optional<at::Tensor> meta_ends = ends ? std::optional<at::Tensor>(on_meta(*ends)) : std::nullopt;
    output = like(at::_grouped_mm(on_meta(left), on_meta(right), meta_ends, bias, dtype));
  } else {
    std::vector<int64_t> sizes{left.size(-2), right.size(-1)};
    if (left.dim() == right.dim()) {
      sizes.insert(sizes.begin(), left.dim() == 3 ? left.size(0) : ends->size(0));
    }
    output = at::empty(sizes, left.options());
  }
  work.outputs = {shape_of(output)};
  VirtualDevice::get().run(work);
  return output;
}

// -- convolutions -----------------------------------------------------------------------------------------------------------

at::Tensor convolve(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const std::optional<at::Tensor> meta_bias = bias ? std::optional<at::Tensor>(on_meta(*bias)) : std::nullopt;
  const at::Tensor output = like(at::convolution_symint(
      on_meta(input), on_meta(weight), meta_bias, stride, padding, dilation, transposed, output_padding, std::move(groups)));
  VirtualDevice::get().run({"convolution", {shape_of(input), shape_of(weight)}, {shape_of(output)}});
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef,
    c10::SymIntArrayRef,
    c10::SymIntArrayRef,
    bool transposed,
    c10::SymIntArrayRef,
    c10::SymInt groups,
    std::array<bool, 3> wanted) {
  at::Tensor gradients[3];
  const auto make = [&](size_t which, at::Tensor made) {
    gradients[which] = std::move(made);
    // `gradient` counts as the output, so there are as many operations as in forward: elements of `gradient` times
    // elements of a filter
    VirtualDevice::get().run({"convolution", {shape_of(gradients[which]), shape_of(weight)}, {shape_of(gradient)}});
  };
  if (wanted[0]) {
    make(0, at::empty_like(input));
  }
  if (wanted[1]) {
    make(1, at::empty_like(weight));
  }
  if (wanted[2]) {
    const int64_t channels = transposed ? weight.size(1) * groups.guard_int(__FILE__, __LINE__) : weight.size(0);
    gradients[2] = at::empty({channels}, gradient.options());
    VirtualDevice::get().run({"aten::sum", {shape_of(gradient)}, {shape_of(gradients[2])}});
  }
  return {gradients[0], gradients[1], gradients[2]};
}

} // namespace

void register_kernels(torch::Library& aten) {
  // The library is never destroyed, because destroying it removes its registrations.
  auto& autograd = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  aten.impl("rms_norm", TORCH_FN(rms_norm));
  autograd.impl("rms_norm", TORCH_FN(rms_norm));
  aten.impl("embedding_dense_backward", TORCH_FN(embed_backward));
  aten.impl("_grouped_mm", TORCH_FN(grouped_mm));
  aten.impl("convolution_overrideable", TORCH_FN(convolve));
  aten.impl("convolution_backward_overrideable", TORCH_FN(convolve_backward));
  register_attention(aten, autograd);
  register_chosen(aten);
  register_autocast();
}

} // namespace memplug
