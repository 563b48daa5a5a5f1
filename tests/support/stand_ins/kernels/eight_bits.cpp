#include "eight_bits.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace stand_ins {
namespace {

float largest_of(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? 448.0f : 57344.0f;
}

float largest_magnitude(const float* values, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::abs(values[i]));
  }
  return most;
}

float scale_for(float amax, float largest, bool power_of_two) {
  if (!(amax > 0) || !std::isfinite(amax)) {
    return 1;
  }
  const float scale = largest / amax;
  return power_of_two ? std::exp2(std::floor(std::log2(scale))) : scale;
}

} // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& input, std::optional<Tensor> scale, std::optional<Tensor> amax,
                                    at::ScalarType type, Scaling scaling, int64_t block, bool transposed,
                                    std::optional<std::tuple<Tensor, Tensor>> out) {
  Elements from = elements(input);
  const int64_t rows = transposed ? from.columns : from.rows, columns = transposed ? from.rows : from.columns;
  from.transposed = false;
  const auto options = input.options().requires_grad(false);
  const Tensor data = out ? std::get<0>(*out)
                          : at::empty(transposed ? std::vector<int64_t>{rows, columns} : input.sizes().vec(),
                                      options.dtype(type));
  const bool blocked = scaling == Scaling::block || scaling == Scaling::power_of_two_block;
  const int64_t width = blocked ? block : rows * columns, blocks = blocked ? (columns + block - 1) / block : 1;
  const Tensor inverse =
      out ? std::get<1>(*out) : at::empty({blocked ? rows * blocks : 1}, options.dtype(at::kFloat));
  const Elements to = elements(data);
  const float* given = scale ? scale->const_data_ptr<float>() : nullptr;
  float *found = amax ? amax->data_ptr<float>() : nullptr, *inverses = inverse.data_ptr<float>();
  TORCH_CHECK(scaling != Scaling::delayed || given, "delayed scaling without a scale");
  launch("quantize", {input, scale.value_or(Tensor())}, {data, inverse, amax.value_or(Tensor())}, [=] {
    Floats values = from.read();
    if (transposed) {
      Floats turned(values.size());
      for (int64_t i = 0; i < rows * columns; ++i) {
        turned[i] = values[i % columns * rows + i / columns];
      }
      values.swap(turned);
    }
    if (found) {
      *found = std::max(*found, largest_magnitude(values.data(), static_cast<int64_t>(values.size())));
    }
    const float most = largest_of(type);
    for (int64_t row = 0; row < (blocked ? rows : 1); ++row) {
      for (int64_t b = 0; b < blocks; ++b) {
        float* begin = values.data() + row * columns + b * width;
        const int64_t count = blocked ? std::min(width, columns - b * width) : width;
        const float factor = given && scaling == Scaling::delayed
            ? *given
            : scale_for(largest_magnitude(begin, count), most, scaling == Scaling::power_of_two_block);
        inverses[row * blocks + b] = 1 / factor;
        for (int64_t i = 0; i < count; ++i) {
          begin[i] = std::clamp(begin[i] * factor, -most, most);
        }
      }
    }
    to.write(values);
  });
  return {data, inverse};
}

Tensor dequantize(const Operand& operand, at::ScalarType type) {
  Elements from = elements(operand.tensor);
  from.scale_inv = operand.scale_inv->const_data_ptr<float>();
  from.block = operand.block;
  auto sizes = operand.tensor.sizes().vec();
  if (operand.transposed) {
    std::swap(from.rows, from.columns);
    from.transposed = true;
    sizes = {from.rows, from.columns};
  }
  const Tensor out = at::empty(sizes, operand.tensor.options().dtype(type));
  const Elements to = elements(out);
  launch("dequantize", {operand.tensor, *operand.scale_inv}, {out}, [=] { to.write(from.read()); });
  return out;
}

Tensor transpose(const Tensor& eight_bits) {
  const Elements from = elements(eight_bits);
  const Tensor out = at::empty({from.columns, from.rows}, eight_bits.options());
  const auto* source = static_cast<const uint8_t*>(from.data);
  auto* target = static_cast<uint8_t*>(out.data_ptr());
  launch("transpose", {eight_bits}, {out}, [=] {
    for (int64_t i = 0; i < from.rows * from.columns; ++i) {
      target[i % from.columns * from.rows + i / from.columns] = source[i];
    }
  });
  return out;
}

void update_scales(const Tensor& amaxes, const std::vector<Tensor>& histories, const std::vector<Tensor>& scales,
                   const std::string& algorithm, double largest, int64_t margin) {
  const float* reduced = amaxes.const_data_ptr<float>();
  for (size_t t = 0; t < histories.size(); ++t) {
    const int64_t length = histories[t].size(0), count = histories[t].size(1);
    float *history = histories[t].data_ptr<float>(), *scale = scales[t].data_ptr<float>();
    const bool most_recent = algorithm == "most_recent";
    launch("update_scales", {amaxes}, {histories[t], scales[t]}, [=] {
      for (int64_t j = 0; j < count; ++j) {
        float amax = history[j] = reduced[j];
        for (int64_t i = 1; i < length && !most_recent; ++i) {
          amax = std::max(amax, history[i * count + j]);
        }
        // the newest amax goes to the last row, and row 0 is for the next step
        for (int64_t i = 0; i + 1 < length; ++i) {
          history[i * count + j] = history[(i + 1) * count + j];
        }
        if (length > 1) {
          history[(length - 1) * count + j] = reduced[j];
        }
        history[j] = 0;
        if (amax > 0 && std::isfinite(amax)) {
          scale[j] = std::min(static_cast<float>(largest) / amax / std::exp2(static_cast<float>(margin)),
                              std::numeric_limits<float>::max());
        }
      }
    });
    reduced += count;
  }
}

} // namespace stand_ins
