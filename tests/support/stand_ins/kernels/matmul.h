// Matrix products with fused operations, normalizations and activations.
#pragma once
#include <string>

#include "launch.h"

namespace stand_ins {

// An operand of a product: a tensor, or eight bits with their scales.
struct Operand {
  Tensor tensor;
  std::optional<Tensor> scale_inv;
  int64_t block = 0;
  bool transposed = false;
};

// Multiplies matrices. "TN": out[m, n] = b[m, k] a[n, k]^T (+ bias), a layer's forward; "NN": out[m, n] = b[m, k] a[k,
// n], the gradient of its input; "NT": out[m, n] = b[k, m]^T a[k, n], the gradient of its weight, and bias_grad[m], the
// gradient of its bias. In "TN" and "NN" the bits of a row do not depend on the number of rows.
std::tuple<Tensor, Tensor> gemm(const Operand& a, const Operand& b, const std::string& layout, at::ScalarType type,
                                std::optional<Tensor> out, std::optional<Tensor> bias, bool accumulate,
                                bool with_bias_grad);

// Returns the normalized rows, their means (of a layer norm) and inverse deviations, both float.
std::tuple<Tensor, std::optional<Tensor>, Tensor> norm_forward(const Tensor& input, const Tensor& weight,
                                                               std::optional<Tensor> bias, double eps,
                                                               bool zero_centered, bool rms);
std::tuple<Tensor, Tensor, std::optional<Tensor>> norm_backward(const Tensor& grad, const Tensor& input,
                                                                std::optional<Tensor> mean, const Tensor& deviation,
                                                                const Tensor& weight, bool zero_centered, bool rms);

// Applies "gelu", "relu", "silu", "qgelu", "srelu", or a gated kind ("geglu", "reglu", "swiglu", "qgeglu", "sreglu"),
// which activates the first half of a row and multiplies it by the second.
Tensor activation_forward(const Tensor& input, const std::string& kind);
Tensor activation_backward(const Tensor& grad, const Tensor& input, const std::string& kind);

} // namespace stand_ins
