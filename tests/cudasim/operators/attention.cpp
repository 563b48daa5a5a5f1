// Flash, memory-efficient and cuDNN attention, by plain math in fp32 (fp64 stays). Each returns the results that the
// real operator keeps for backward. Dropout is drawn again in backward, from the seed and offset that forward returned.
#include <cmath>

#include "operators.h"

namespace cudasim {
namespace {

// A forward's scores, and its backward's gradients. Heads of keys and values are repeated for grouped queries.
struct Attention {
  struct Options {
    double dropout = 0;
    bool causal = false;
    std::optional<double> scale;
    Draw drawn;
  };
  Tensor q, k, v, scores, mask; // mask: dropout's, scaled
  double scale;
  int64_t key_heads;

  // query[batch, heads, tokens, width], key and value[batch, key heads, tokens, width]
  Attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Options& options)
      : scale(options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))))), key_heads(key.size(1)) {
    const auto type = wide(query);
    q = query.to(type);
    k = key.to(type).repeat_interleave(query.size(1) / key_heads, 1);
    v = value.to(type).repeat_interleave(query.size(1) / key_heads, 1);
    scores = at::matmul(q, k.transpose(-2, -1)) * scale;
    if (bias.defined()) {
      scores = bias.scalar_type() == at::kBool ? scores.masked_fill(bias.logical_not(), -INFINITY)
                                               : scores + bias.to(type);
    }
    if (options.causal) {
      scores = scores.masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).triu(1), -INFINITY);
    }
    if (options.dropout > 0) {
      const double keep = 1 - options.dropout;
      mask = at::empty(scores.sizes(), scores.options()).bernoulli_(keep, options.drawn.generator()) / keep;
    }
  }

  Tensor dropped(const Tensor& weights) const {
    return mask.defined() ? weights * mask : weights;
  }

  Tensor weights(const Tensor& lse) const {
    return at::nan_to_num(at::exp(scores - lse.unsqueeze(-1)), 0.0);
  }

  std::pair<Tensor, Tensor> forward() const {
    const Tensor lse = at::logsumexp(scores, {-1});
    return {at::matmul(dropped(weights(lse)), v), lse};
  }

  Tensor folded(const Tensor& grad) const { // sums the gradients of repeated heads
    return grad.view({grad.size(0), key_heads, grad.size(1) / key_heads, grad.size(2), grad.size(3)}).sum(2);
  }

  // Returns the gradients of q, k, v and the scores.
  std::vector<Tensor> backward(const Tensor& grad_out, const Tensor& out, const Tensor& lse) const {
    const Tensor grad = grad_out.to(q.scalar_type());
    const Tensor w = weights(lse.slice(-1, 0, q.size(2)).to(q.scalar_type()));
    const Tensor grad_w = dropped(at::matmul(grad, v.transpose(-2, -1)));
    const Tensor grad_scores = w * (grad_w - (grad * out.to(q.scalar_type())).sum(-1, true));
    return {at::matmul(grad_scores, k) * scale, folded(at::matmul(grad_scores.transpose(-2, -1), q) * scale),
            folded(at::matmul(dropped(w).transpose(-2, -1), grad)), grad_scores};
  }
};

std::optional<double> scale_at(const Stack& s, size_t i) {
  return s[i].isNone() ? std::nullopt : std::optional<double>(s[i].toDouble());
}

Tensor seed_and_offset(Draw drawn) { // as flash attention keeps the two
  const auto both = {static_cast<int64_t>(drawn.seed), static_cast<int64_t>(drawn.offset)};
  return at::tensor(at::ArrayRef<int64_t>(both), at::kLong).view(at::kUInt64);
}
Tensor one(uint64_t value) {
  return at::scalar_tensor(static_cast<int64_t>(value), at::kLong);
}
Draw drawn_by(double dropout, const Tensor& seed, const Tensor& offset) {
  if (dropout <= 0) {
    return {};
  }
  const auto* first = static_cast<const uint64_t*>(seed.data_ptr());
  return seed.numel() == 2 ? Draw{first[0], first[1]} : Draw{*first, *static_cast<const uint64_t*>(offset.data_ptr())};
}

Stack flash(const c10::OperatorHandle&, Stack s, Draw drawn) {
  const Attention a(tensor_at(s, 0), tensor_at(s, 1), tensor_at(s, 2), {},
                    {s[3].toDouble(), s[4].toBool(), scale_at(s, 6), drawn});
  const auto [out, lse] = a.forward();
  const Tensor unused = at::zeros({}, at::kLong).view(at::kUInt64);
  return {out, lse.to(at::kFloat), Tensor(), Tensor(), 0, 0, seed_and_offset(drawn), unused, at::zeros({0})};
}

Stack flash_backward(const c10::OperatorHandle&, Stack s, Draw) {
  const double dropout = s[10].toDouble();
  const Attention a(tensor_at(s, 1), tensor_at(s, 2), tensor_at(s, 3), {},
                    {dropout, s[11].toBool(), scale_at(s, 14), drawn_by(dropout, tensor_at(s, 12), tensor_at(s, 13))});
  const auto g = a.backward(tensor_at(s, 0), tensor_at(s, 4), tensor_at(s, 5));
  return {g[0], g[1], g[2]};
}

Stack efficient(const c10::OperatorHandle&, Stack s, Draw drawn) {
  const Attention a(tensor_at(s, 0), tensor_at(s, 1), tensor_at(s, 2), tensor_at(s, 3),
                    {s[5].toDouble(), s[6].toBool(), scale_at(s, 7), drawn});
  const auto [out, lse] = a.forward();
  const int64_t rows = lse.size(-1), padded = (rows + 31) / 32 * 32; // padded as the real kernel pads
  const Tensor kept = s[4].toBool() ? at::constant_pad_nd(lse, {0, padded - rows}, INFINITY) : lse.slice(-1, 0, 0);
  return {out, kept.to(at::kFloat), one(drawn.seed), one(drawn.offset)};
}

Stack efficient_backward(const c10::OperatorHandle&, Stack s, Draw) {
  const double dropout = s[9].toDouble();
  const Attention a(tensor_at(s, 1), tensor_at(s, 2), tensor_at(s, 3), tensor_at(s, 4),
                    {dropout, s[11].toBool(), scale_at(s, 12), drawn_by(dropout, tensor_at(s, 7), tensor_at(s, 8))});
  const auto g = a.backward(tensor_at(s, 0), tensor_at(s, 5), tensor_at(s, 6));
  const bool biased = s[10].toBoolList()[3] && tensor_at(s, 4).defined();
  return {g[0], g[1], g[2], biased ? at::sum_to(g[3], tensor_at(s, 4).sizes()) : Tensor()};
}

Stack cudnn(const c10::OperatorHandle&, Stack s, Draw drawn) {
  const Attention a(tensor_at(s, 0), tensor_at(s, 1), tensor_at(s, 2), tensor_at(s, 3),
                    {s[5].toDouble(), s[6].toBool(), scale_at(s, 8), drawn});
  const auto [out, lse] = a.forward();
  const Tensor kept = lse.to(at::kFloat).unsqueeze(-1);
  return {out, kept, Tensor(), Tensor(), 0, 0, one(drawn.seed), one(drawn.offset), Tensor()};
}

Stack cudnn_backward(const c10::OperatorHandle&, Stack s, Draw) {
  const double dropout = s[13].toDouble();
  const Attention a(tensor_at(s, 1), tensor_at(s, 2), tensor_at(s, 3), tensor_at(s, 8),
                    {dropout, s[14].toBool(), scale_at(s, 15), drawn_by(dropout, tensor_at(s, 6), tensor_at(s, 7))});
  const auto g = a.backward(tensor_at(s, 0), tensor_at(s, 4), tensor_at(s, 5).squeeze(-1));
  return {g[0], g[1], g[2]};
}

} // namespace

std::map<std::string, Compute> attention_operators() {
  const std::string prefix = "aten::_scaled_dot_product_";
  return {{prefix + "flash_attention", flash},         {prefix + "flash_attention_backward", flash_backward},
          {prefix + "efficient_attention", efficient}, {prefix + "efficient_attention_backward", efficient_backward},
          {prefix + "cudnn_attention", cudnn},         {prefix + "cudnn_attention_backward", cudnn_backward}};
}

} // namespace cudasim
