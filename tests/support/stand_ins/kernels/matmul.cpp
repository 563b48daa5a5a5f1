#include "matmul.h"

#include <cmath>

namespace stand_ins {
namespace {

Elements elements_of(const Operand& operand) {
  Elements found = elements(operand.tensor);
  if (operand.scale_inv) {
    found.scale_inv = operand.scale_inv->const_data_ptr<float>();
    found.block = operand.block;
  }
  if (operand.transposed) {
    std::swap(found.rows, found.columns);
    found.transposed = true;
  }
  return found;
}

Floats turned(const Floats& values, int64_t rows, int64_t columns) {
  Floats made(values.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      made[j * rows + i] = values[i * columns + j];
    }
  }
  return made;
}

// Adds x[m, k] y[k, n] to into[m, n], row by row.
void multiply(const Floats& x, const Floats& y, int64_t m, int64_t n, int64_t k, Floats& into) {
  for (int64_t i = 0; i < m; ++i) {
    float* row = into.data() + i * n;
    for (int64_t l = 0; l < k; ++l) {
      const float factor = x[i * k + l];
      const float* other = y.data() + l * n;
      for (int64_t j = 0; j < n; ++j) {
        row[j] += factor * other[j];
      }
    }
  }
}

float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}

// Returns the value of an activation and its derivative.
std::pair<float, float> activate(float x, const std::string& kind) {
  if (kind == "relu") {
    return {std::max(x, 0.0f), x > 0 ? 1.0f : 0.0f};
  }
  if (kind == "srelu") {
    return {x > 0 ? x * x : 0.0f, x > 0 ? 2 * x : 0.0f};
  }
  if (kind == "silu" || kind == "qgelu") {
    const float factor = kind == "silu" ? 1.0f : 1.702f, s = sigmoid(factor * x);
    return {x * s, s + factor * x * s * (1 - s)};
  }
  const float c = 0.7978845608028654f, t = std::tanh(c * (x + 0.044715f * x * x * x)); // gelu by tanh, as in TE
  return {0.5f * x * (1 + t), 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * c * (1 + 3 * 0.044715f * x * x)};
}

// Returns the activation of a gated kind's gate, or "".
std::string gate_of(const std::string& kind) {
  return kind == "swiglu" ? "silu" : kind == "geglu" ? "gelu" : kind == "reglu" ? "relu" : kind == "qgeglu" ? "qgelu"
      : kind == "sreglu" ? "srelu" : "";
}

} // namespace

std::tuple<Tensor, Tensor> gemm(const Operand& a, const Operand& b, const std::string& layout, at::ScalarType type,
                                std::optional<Tensor> out, std::optional<Tensor> bias, bool accumulate,
                                bool with_bias_grad) {
  const Elements first = elements_of(a), second = elements_of(b);
  const bool of_weight = layout == "NT", forward = layout == "TN";
  const int64_t m = of_weight ? second.columns : second.rows, k = of_weight ? second.rows : second.columns;
  const int64_t n = forward ? first.rows : first.columns;
  TORCH_CHECK(k == (forward ? first.columns : first.rows), "gemm ", layout, " of [", first.rows, ", ", first.columns,
              "] and [", second.rows, ", ", second.columns, "]");
  const auto options = a.tensor.options().requires_grad(false);
  if (!out) {
    auto sizes = of_weight ? std::vector<int64_t>{m, n} : b.tensor.sizes().vec();
    sizes.back() = n;
    out = at::empty(sizes, options.dtype(type));
  }
  const Tensor bias_grad = with_bias_grad ? at::empty({m}, options.dtype(type)) : Tensor();
  const Elements result = elements(*out), bias_read = bias ? elements(*bias) : Elements();
  const Elements bias_written = with_bias_grad ? elements(bias_grad) : Elements();
  TORCH_CHECK(out->numel() == m * n, "gemm's output has ", out->numel(), " elements, not ", m * n);
  launch("gemm",
         {a.tensor, b.tensor, a.scale_inv.value_or(Tensor()), b.scale_inv.value_or(Tensor()), bias.value_or(Tensor())},
         {*out, bias_grad}, [=] {
           const Floats y = forward ? turned(first.read(), first.rows, first.columns) : first.read();
           const Floats x = of_weight ? turned(second.read(), second.rows, second.columns) : second.read();
           Floats product(m * n, 0.0f);
           multiply(x, y, m, n, k, product);
           if (bias_read.data) {
             const Floats add = bias_read.read();
             for (int64_t i = 0; i < m * n; ++i) {
               product[i] += add[i % n];
             }
           }
           if (accumulate) {
             const Floats before = result.read();
             for (int64_t i = 0; i < m * n; ++i) {
               product[i] += before[i];
             }
           }
           result.write(product);
           if (bias_written.data) {
             Floats sums(m, 0.0f);
             for (int64_t i = 0; i < m * k; ++i) {
               sums[i / k] += x[i];
             }
             bias_written.write(sums);
           }
         });
  return {*out, bias_grad};
}

std::tuple<Tensor, std::optional<Tensor>, Tensor> norm_forward(const Tensor& input, const Tensor& weight,
                                                               std::optional<Tensor> bias, double eps,
                                                               bool zero_centered, bool rms) {
  const Elements x = elements(input), w = elements(weight), b = bias ? elements(*bias) : Elements();
  const auto options = input.options().requires_grad(false);
  const Tensor out = at::empty(input.sizes(), options);
  std::optional<Tensor> mean;
  if (!rms) {
    mean = at::empty({x.rows}, options.dtype(at::kFloat));
  }
  const Tensor deviation = at::empty({x.rows}, options.dtype(at::kFloat));
  const Elements y = elements(out);
  float *means = mean ? mean->data_ptr<float>() : nullptr, *deviations = deviation.data_ptr<float>();
  launch("norm", {input, weight, bias.value_or(Tensor())}, {out, deviation, mean.value_or(Tensor())}, [=] {
    Floats values = x.read();
    const Floats gains = w.read(), shifts = b.data ? b.read() : Floats(x.columns, 0.0f);
    for (int64_t i = 0; i < x.rows; ++i) {
      float* row = values.data() + i * x.columns;
      float sum = 0, squares = 0;
      for (int64_t j = 0; j < x.columns && !rms; ++j) {
        sum += row[j];
      }
      const float center = sum / x.columns;
      for (int64_t j = 0; j < x.columns; ++j) {
        squares += (row[j] - center) * (row[j] - center);
      }
      deviations[i] = 1 / std::sqrt(squares / x.columns + static_cast<float>(eps));
      if (means) {
        means[i] = center;
      }
      for (int64_t j = 0; j < x.columns; ++j) {
        row[j] = (row[j] - center) * deviations[i] * (gains[j] + zero_centered) + shifts[j];
      }
    }
    y.write(values);
  });
  return {out, mean, deviation};
}

std::tuple<Tensor, Tensor, std::optional<Tensor>> norm_backward(const Tensor& grad, const Tensor& input,
                                                                std::optional<Tensor> mean, const Tensor& deviation,
                                                                const Tensor& weight, bool zero_centered, bool rms) {
  const Elements dy = elements(grad), x = elements(input), w = elements(weight);
  const auto options = weight.options().requires_grad(false);
  const Tensor dx = at::empty(input.sizes(), input.options().requires_grad(false));
  const Tensor dw = at::empty(weight.sizes(), options);
  std::optional<Tensor> db;
  if (!rms) {
    db = at::empty(weight.sizes(), options);
  }
  const Elements to_input = elements(dx), to_weight = elements(dw), to_bias = db ? elements(*db) : Elements();
  const float *means = mean ? mean->const_data_ptr<float>() : nullptr, *deviations = deviation.const_data_ptr<float>();
  launch("norm_backward", {grad, input, mean.value_or(Tensor()), deviation, weight}, {dx, dw, db.value_or(Tensor())},
         [=] {
           const Floats grads = dy.read(), gains = w.read();
           Floats values = x.read(), gain_grads(x.columns, 0.0f), shift_grads(x.columns, 0.0f);
           for (int64_t i = 0; i < x.rows; ++i) {
             float* row = values.data() + i * x.columns;
             const float* over = grads.data() + i * x.columns;
             float along = 0, across = 0;
             for (int64_t j = 0; j < x.columns; ++j) {
               row[j] = (row[j] - (means ? means[i] : 0)) * deviations[i];
               gain_grads[j] += over[j] * row[j];
               shift_grads[j] += over[j];
               along += over[j] * (gains[j] + zero_centered) * row[j];
               across += rms ? 0 : over[j] * (gains[j] + zero_centered);
             }
             for (int64_t j = 0; j < x.columns; ++j) {
               row[j] = (over[j] * (gains[j] + zero_centered) - (row[j] * along + across) / x.columns) * deviations[i];
             }
           }
           to_input.write(values);
           to_weight.write(gain_grads);
           if (to_bias.data) {
             to_bias.write(shift_grads);
           }
         });
  return {dx, dw, db};
}

Tensor activation_forward(const Tensor& input, const std::string& kind) {
  const std::string gate = gate_of(kind);
  auto sizes = input.sizes().vec();
  sizes.back() /= gate.empty() ? 1 : 2;
  const Tensor out = at::empty(sizes, input.options().requires_grad(false));
  const Elements x = elements(input), y = elements(out);
  launch("activation", {input}, {out}, [=] {
    const Floats values = x.read();
    Floats made(y.rows * y.columns);
    for (int64_t i = 0; i < y.rows * y.columns; ++i) {
      const float* row = values.data() + i / y.columns * x.columns;
      const int64_t j = i % y.columns;
      made[i] = gate.empty() ? activate(row[j], kind).first : activate(row[j], gate).first * row[j + y.columns];
    }
    y.write(made);
  });
  return out;
}

Tensor activation_backward(const Tensor& grad, const Tensor& input, const std::string& kind) {
  const std::string gate = gate_of(kind);
  const Tensor out = at::empty(input.sizes(), input.options().requires_grad(false));
  const Elements dy = elements(grad), x = elements(input), dx = elements(out);
  launch("activation_backward", {grad, input}, {out}, [=] {
    const Floats grads = dy.read(), values = x.read();
    Floats made(values.size());
    for (int64_t i = 0; i < dy.rows * dy.columns; ++i) {
      const int64_t at = i / dy.columns * x.columns + i % dy.columns;
      const auto [value, slope] = activate(values[at], gate.empty() ? kind : gate);
      made[at] = grads[i] * slope * (gate.empty() ? 1 : values[at + dy.columns]);
      if (!gate.empty()) {
        made[at + dy.columns] = grads[i] * value;
      }
    }
    dx.write(made);
  });
  return out;
}

} // namespace stand_ins
