// Attention as one kernel in forward and one kernel in backward. In half precision the operator of the chosen back end (cuDNN or
// flash attention) runs, which saves the same tensors for backward as on CUDA. In other precisions, and with other back ends,
// torch's generic operator for other vendors' devices runs.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"

namespace memplug {
namespace {

using Optional = std::optional<at::Tensor>;
using Scale = std::optional<double>;

// Returns whether the kernels of cuDNN and flash attention accept these tensors.
bool is_for_kernels(const at::Tensor& query, const at::Tensor& value) {
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return is_half && query.dim() == 4 && query.size(-1) == value.size(-1) && query.size(-1) % 8 == 0 && query.size(-1) <= 256;
}

bool is_chosen(AttentionBackend backend, const at::Tensor& query, const at::Tensor& value) {
  return VirtualDevice::get().attention == backend && is_for_kernels(query, value);
}

// Tells torch which back end to use. On devices of PrivateUse1 torch knows only cuDNN and the generic operator;
// `attend` chooses flash attention.
int64_t choose(
    const at::Tensor& query, const at::Tensor&, const at::Tensor& value, const Optional&, double, bool, Scale, bool) {
  const bool is_cudnn = is_chosen(AttentionBackend::CUDNN, query, value);
  return static_cast<int64_t>(is_cudnn ? sdp::SDPBackend::cudnn_attention : sdp::SDPBackend::overrideable);
}

at::Tensor attend(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const Optional& mask,
    double dropout,
    bool causal,
    Scale scale,
    bool grouped) {
  if (mask || !is_chosen(AttentionBackend::FLASH, query, value)) {
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
  }
  const double given = sdp::calculate_scale(query, scale).guard_float(__FILE__, __LINE__);
  return std::get<0>(at::_scaled_dot_product_flash_attention(query, key, value, dropout, causal, false, given));
}

// -- forward ----------------------------------------------------------------------------------------------------------------

struct Attended {
  at::Tensor output, sums;
};

// Runs the forward kernel. If `last`, the log-sum-exps get a last dimension of size 1, as cuDNN's have.
Attended run_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Optional& bias, bool causal, bool last) {
  const at::DisableRecordFunctionGuard one;
  const auto sizes = query.sizes(); // batch, heads, tokens, channels
  at::Tensor output = at::empty_like(query); // with the query's layout
  if (value.size(-1) != query.size(-1)) {
    output = at::empty({sizes[0], sizes[2], sizes[1], value.size(-1)}, query.options()).transpose(1, 2);
  }
  std::vector<int64_t> rows{sizes[0], sizes[1], sizes[2]};
  if (last) {
    rows.push_back(1);
  }
  at::Tensor sums = at::empty(rows, query.options().dtype(at::kFloat));
  Work work{"attention", {shape_of(query), shape_of(key), shape_of(value)}, {shape_of(output), shape_of(sums)}, causal};
  if (bias) {
    work.inputs.push_back(shape_of(*bias));
  }
  VirtualDevice::get().run(work);
  return {output, sums};
}

using Results = std::
    tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

// Returns all results of an attention operator's forward. The random seed gets sizes `seeds` and dtype `type`. If
// `masked`, the last result is an empty mask, otherwise an undefined tensor.
Results results(
    const Attended& found, const at::Tensor& query, const at::Tensor& key, c10::IntArrayRef seeds, at::ScalarType type, bool masked) {
  const at::DisableRecordFunctionGuard one;
  at::Tensor seed = at::empty(seeds, query.options().dtype(type));
  at::Tensor mask = masked ? at::empty({0}, query.options()) : at::Tensor();
  at::Tensor offset = at::empty({}, seed.options());
  return {
      found.output, found.sums, {}, {}, query.size(2), key.size(2), std::move(seed), std::move(offset), std::move(mask)};
}

Results other(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const Optional& bias,
    double,
    bool causal,
    bool,
    Scale) {
  const Attended found = run_forward(query, key, value, bias, causal, false);
  return results(found, query, key, {2}, at::kLong, false);
}

Results cudnn(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const Optional& bias,
    bool,
    double,
    bool causal,
    bool,
    Scale) {
  const Attended found = run_forward(query, key, value, bias, causal, true);
  return results(found, query, key, {}, at::kLong, false);
}

Results flash(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double, bool causal, bool, Scale) {
  const Attended found = run_forward(query, key, value, {}, causal, false);
  return results(found, query, key, {2}, at::kUInt64, true);
}

// -- backward ---------------------------------------------------------------------------------------------------------------

std::array<at::Tensor, 4> run_backward(
    const at::Tensor& gradient,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& bias,
    bool causal) {
  const at::DisableRecordFunctionGuard one;
  std::array<at::Tensor, 4> gradients{at::empty_like(query), at::empty_like(key), at::empty_like(value), at::Tensor()};
  if (bias.defined()) {
    gradients[3] = at::empty_like(bias);
  }
  Work work{"attention_backward", {shape_of(query), shape_of(key), shape_of(value), shape_of(gradient)}, {}, causal};
  for (const at::Tensor& each : gradients) {
    if (each.defined()) {
      work.outputs.push_back(shape_of(each));
    }
  }
  VirtualDevice::get().run(work);
  return gradients;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> other_backward(
    const at::Tensor& gradient,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& bias,
    std::array<bool, 4> wanted,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double,
    bool causal,
    const at::Tensor&,
    const at::Tensor&,
    Scale) {
  auto [q, k, v, b] = run_backward(gradient, query, key, value, wanted[3] ? bias : at::Tensor(), causal);
  return {q, k, v, b};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Gradients cudnn_backward(
    const at::Tensor& gradient,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double,
    bool causal,
    Scale) {
  auto [q, k, v, none] = run_backward(gradient, query, key, value, {}, causal);
  return {q, k, v};
}

Gradients flash_backward(
    const at::Tensor& gradient,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double,
    bool causal,
    const at::Tensor&,
    const at::Tensor&,
    Scale) {
  auto [q, k, v, none] = run_backward(gradient, query, key, value, {}, causal);
  return {q, k, v};
}

} // namespace

void register_attention(torch::Library& aten, torch::Library& autograd) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
  aten.impl("scaled_dot_product_attention", TORCH_FN(attend));
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attend));
  aten.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(other));
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(other_backward));
  aten.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  aten.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  aten.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  aten.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
}

} // namespace memplug
