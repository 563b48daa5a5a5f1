// Operators besides attention for which the CPU has no kernel, or a different kernel: dropout, norms.
#include "operators.h"

namespace cudasim {
namespace {

Stack native_dropout(const c10::OperatorHandle&, Stack s, Draw drawn) {
  const Tensor x = tensor_at(s, 0);
  const double p = s[1].toDouble();
  if (!s[2].isNone() && !s[2].toBool()) { // not training
    return {x.clone(), at::ones(x.sizes(), at::kBool)};
  }
  const Tensor mask = at::empty(x.sizes(), at::kFloat).bernoulli_(1 - p, drawn.generator());
  return {p == 1 ? at::zeros_like(x) : x * mask.to(x.scalar_type()) * (1 / (1 - p)), mask.to(at::kBool)};
}

Stack fused_dropout(const c10::OperatorHandle&, Stack s, Draw drawn) {
  const Tensor x = tensor_at(s, 0);
  const double keep = s[1].toDouble();
  const Tensor mask = at::empty(x.sizes(), at::kFloat).bernoulli_(keep, drawn.generator());
  return {x * mask.to(x.scalar_type()) / keep, mask.to(at::kByte)};
}

Stack layer_norm_backward(const c10::OperatorHandle& op, Stack s, Draw) {
  for (const size_t statistic : {3, 4}) { // the CPU keeps mean and deviation in the type of its input
    s[statistic] = tensor_at(s, statistic).to(tensor_at(s, 1).scalar_type());
  }
  op.callBoxed(&s);
  return s;
}

Stack rms_norm_backward(const c10::OperatorHandle&, Stack s, Draw) {
  const Tensor x = tensor_at(s, 1).to(wide(tensor_at(s, 1))), grad = tensor_at(s, 0).to(x.scalar_type());
  const Tensor deviation = tensor_at(s, 3).to(x.scalar_type()), normal = x * deviation, weight = tensor_at(s, 4);
  const auto normalized = static_cast<int64_t>(s[2].toIntVector().size());
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < x.dim(); ++d) {
    (d < x.dim() - normalized ? outer : inner).push_back(d);
  }
  const Tensor scaled = weight.defined() ? grad * weight.to(x.scalar_type()) : grad;
  const Tensor grad_x = deviation * (scaled - normal * (scaled * normal).mean(inner, true));
  if (!weight.defined()) {
    return {grad_x, Tensor()};
  }
  return {grad_x, outer.empty() ? grad * normal : (grad * normal).sum(outer)};
}

// Takes input, weight, padding, stride, dilation, groups.
Stack convolution(const c10::OperatorHandle&, Stack s, Draw) {
  return {at::convolution(tensor_at(s, 0), tensor_at(s, 1), {}, s[3].toIntVector(), s[2].toIntVector(),
                          s[4].toIntVector(), false, std::vector<int64_t>(s[2].toIntVector().size(), 0), s[5].toInt())};
}

// Returns one more result than the CPU's operator, an empty reserve.
Stack batch_norm(const c10::OperatorHandle&, Stack s, Draw) {
  const auto [out, mean, deviation] = at::native_batch_norm(tensor_at(s, 0), tensor_at(s, 1), tensor_at(s, 2),
                                                            tensor_at(s, 3), tensor_at(s, 4), s[5].toBool(),
                                                            s[6].toDouble(), s[7].toDouble());
  return {out, mean, deviation, at::empty({0}, at::kByte)};
}

Stack batch_norm_backward(const c10::OperatorHandle&, Stack s, Draw) {
  auto [of_input, of_weight, of_bias] =
      at::native_batch_norm_backward(tensor_at(s, 1), tensor_at(s, 0), tensor_at(s, 2), tensor_at(s, 3),
                                     tensor_at(s, 4), tensor_at(s, 5), tensor_at(s, 6), true, s[7].toDouble(),
                                     {true, true, true});
  return {of_input, of_weight, of_bias};
}

// Takes whole numbers too, as on CUDA.
Stack histogram(const c10::OperatorHandle&, Stack s, Draw) {
  const Tensor x = tensor_at(s, 0);
  return {at::histc(x.to(wide(x)), s[1].toInt(), s[2].toScalar(), s[3].toScalar()).to(x.scalar_type())};
}

} // namespace

std::map<std::string, Compute> other_operators() {
  return {{"aten::cudnn_batch_norm", batch_norm},
          {"aten::cudnn_batch_norm_backward", batch_norm_backward},
          {"aten::cudnn_convolution", convolution},
          {"aten::histc", histogram},
          {"aten::native_dropout", native_dropout},
          {"aten::_fused_dropout", fused_dropout},
          {"aten::native_layer_norm_backward", layer_norm_backward},
          {"aten::_fused_rms_norm_backward", rms_norm_backward}};
}

} // namespace cudasim
