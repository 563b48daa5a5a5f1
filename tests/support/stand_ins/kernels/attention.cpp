#include "attention.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace stand_ins {
namespace {

// The heads of a tensor of any layout: the address of each row of a head.
struct Heads {
  char* data = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t size = 0, heads = 0, width = 0; // bytes of an element, heads, elements of a row
  int64_t token = 0, batch = 0, head = 0; // strides in elements

  Floats read(int64_t b, int64_t first, int64_t count, int64_t h) const {
    Floats values(count * width);
    for (int64_t i = 0; i < count; ++i) {
      const Floats row = Elements{at(b, first + i, h), type, 1, width}.read();
      std::copy(row.begin(), row.end(), values.begin() + i * width);
    }
    return values;
  }

  void write(int64_t b, int64_t first, int64_t h, const Floats& values) const {
    for (size_t i = 0; i * width < values.size(); ++i) {
      Elements{at(b, first + i, h), type, 1, width}.write(
          Floats(values.begin() + i * width, values.begin() + (i + 1) * width));
    }
  }

  char* at(int64_t b, int64_t i, int64_t h) const {
    return data + (i * token + b * batch + h * head) * size;
  }
};

Heads heads_of(const Tensor& tensor, const std::string& format) {
  TORCH_CHECK(tensor.stride(-1) == 1, "attention: a head's row is not contiguous");
  const bool packed = format == "thd";
  TORCH_CHECK(tensor.dim() == (packed ? 3 : 4), "attention: ", format, " of ", tensor.dim(), " dimensions");
  const int64_t s = format == "bshd" ? 1 : 0;
  return {static_cast<char*>(tensor.data_ptr()), tensor.scalar_type(), static_cast<int64_t>(tensor.element_size()),
          tensor.size(-2), tensor.size(-1), tensor.stride(s), packed ? 0 : tensor.stride(1 - s), tensor.stride(-2)};
}

// The tokens of one sequence.
struct Sequence {
  int64_t batch, query_first, queries, key_first, keys;
};

struct Sequences {
  int64_t batches = 0, queries = 0, keys = 0; // tokens of each sequence, or all tokens if packed
  const int32_t *query_starts = nullptr, *key_starts = nullptr;

  Sequence of(int64_t b) const {
    return query_starts ? Sequence{0, query_starts[b], query_starts[b + 1] - query_starts[b], key_starts[b],
                                   key_starts[b + 1] - key_starts[b]}
                        : Sequence{b, 0, queries, 0, keys};
  }
};

Sequences sequences_of(const Tensor& query, const Tensor& key, const Attention& how) {
  if (how.format == "thd") {
    TORCH_CHECK(how.query_starts && how.key_starts, "attention: packed sequences without their starts");
    return {how.query_starts->numel() - 1, query.size(0), key.size(0), how.query_starts->const_data_ptr<int32_t>(),
            how.key_starts->const_data_ptr<int32_t>()};
  }
  const int64_t s = how.format == "bshd" ? 1 : 0;
  return {query.size(1 - s), query.size(s), key.size(s)};
}

// Returns the dropout factor of a pair of tokens, equal in forward and backward.
float kept(const int64_t* seeds, double dropout, uint64_t b, uint64_t h, uint64_t i, uint64_t j) {
  if (dropout <= 0) {
    return 1;
  }
  uint64_t x = static_cast<uint64_t>(seeds[0]) + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(seeds[1]);
  for (const uint64_t part : {b, h, i, j}) {
    x = (x ^ part) * 0xBF58476D1CE4E5B9ull;
    x ^= x >> 29;
  }
  return static_cast<double>(x >> 11) * 0x1p-53 < dropout ? 0.0f : static_cast<float>(1 / (1 - dropout));
}

std::pair<int64_t, int64_t> seen(int64_t i, const Sequence& of, const Attention& how) {
  const int64_t last = i + (how.bottom_right ? of.keys - of.queries : 0);
  const int64_t begin = how.left < 0 ? 0 : std::max<int64_t>(0, last - how.left);
  return {begin, how.causal ? std::clamp<int64_t>(last + 1, 0, of.keys) : of.keys};
}

float dot(const float* x, const float* y, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}

void add(float* to, const float* from, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] += factor * from[i];
  }
}

Tensor new_heads(const Tensor& query, int64_t width) {
  auto sizes = query.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, query.options().requires_grad(false));
}

} // namespace

std::pair<int64_t, int64_t> next_random() {
  const at::Generator shared = at::detail::getDefaultCPUGenerator(); // shared by all threads
  auto* generator = at::check_generator<at::CPUGeneratorImpl>(shared);
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  const auto first = static_cast<int64_t>(generator->random64());
  return {first, static_cast<int64_t>(generator->random64())};
}

Tensor seeds(const Tensor& like, int64_t first, int64_t second) {
  const Tensor made = at::empty({2}, like.options().dtype(at::kLong).requires_grad(false));
  int64_t* to = made.data_ptr<int64_t>();
  launch("seeds", {}, {made}, [=] {
    to[0] = first;
    to[1] = second;
  });
  return made;
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& seeds, const Attention& how, bool stats) {
  const Sequences all = sequences_of(query, key, how);
  const Tensor out = new_heads(query, value.size(-1));
  std::vector<int64_t> sizes{query.size(-2), all.queries};
  if (!all.query_starts) {
    sizes.insert(sizes.begin(), all.batches);
  }
  if (stats) {
    sizes.push_back(1);
  }
  const Tensor sums = at::empty(sizes, query.options().dtype(at::kFloat).requires_grad(false));
  const Heads q = heads_of(query, how.format), k = heads_of(key, how.format), v = heads_of(value, how.format);
  const Heads o = heads_of(out, how.format);
  float* logarithms = sums.data_ptr<float>();
  const int64_t* drawn = seeds.const_data_ptr<int64_t>();
  launch("attention",
         {query, key, value, seeds, how.query_starts.value_or(Tensor()), how.key_starts.value_or(Tensor())},
         {out, sums}, [=] {
           for (int64_t b = 0; b < all.batches; ++b) {
             const Sequence of = all.of(b);
             for (int64_t h = 0; h < q.heads; ++h) {
               const int64_t group = h / (q.heads / k.heads);
               const Floats queries = q.read(of.batch, of.query_first, of.queries, h);
               const Floats keys = k.read(of.batch, of.key_first, of.keys, group);
               const Floats values = v.read(of.batch, of.key_first, of.keys, group);
               Floats made(of.queries * v.width, 0.0f), scores(of.keys);
               for (int64_t i = 0; i < of.queries; ++i) {
                 const auto [begin, end] = seen(i, of, how);
                 float most = -std::numeric_limits<float>::infinity(), sum = 0;
                 for (int64_t j = begin; j < end; ++j) {
                   scores[j] = static_cast<float>(how.scale) * dot(&queries[i * q.width], &keys[j * q.width], q.width);
                   most = std::max(most, scores[j]);
                 }
                 for (int64_t j = begin; j < end; ++j) {
                   scores[j] = std::exp(scores[j] - most);
                   sum += scores[j];
                 }
                 for (int64_t j = begin; j < end; ++j) {
                   add(&made[i * v.width], &values[j * v.width], scores[j] / sum * kept(drawn, how.dropout, b, h, i, j),
                       v.width);
                 }
                 const int64_t row = all.query_starts ? h * all.queries + of.query_first + i
                                                      : (b * q.heads + h) * all.queries + i;
                 logarithms[row] = begin < end ? most + std::log(sum) : most;
               }
               o.write(of.batch, of.query_first, h, made);
             }
           }
         });
  return {out, sums};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& sums,
                                                      const Tensor& seeds, const Attention& how,
                                                      std::optional<std::tuple<Tensor, Tensor, Tensor>> into) {
  const Sequences all = sequences_of(query, key, how);
  if (!into) {
    into.emplace(new_heads(query, query.size(-1)), new_heads(key, key.size(-1)), new_heads(value, value.size(-1)));
  }
  const Tensor dq = std::get<0>(*into), dk = std::get<1>(*into), dv = std::get<2>(*into);
  const Heads q = heads_of(query, how.format), k = heads_of(key, how.format), v = heads_of(value, how.format);
  const Heads o = heads_of(out, how.format), over = heads_of(grad, how.format);
  const Heads to_q = heads_of(dq, how.format), to_k = heads_of(dk, how.format), to_v = heads_of(dv, how.format);
  const float* logarithms = sums.const_data_ptr<float>();
  const int64_t* drawn = seeds.const_data_ptr<int64_t>();
  const auto one = [=](int64_t b, int64_t h, const Sequence& of, const Floats& keys, const Floats& values,
                       Floats& key_grads, Floats& value_grads) {
    const Floats queries = q.read(of.batch, of.query_first, of.queries, h);
    const Floats outs = o.read(of.batch, of.query_first, of.queries, h);
    const Floats grads = over.read(of.batch, of.query_first, of.queries, h);
    Floats made(queries.size(), 0.0f);
    for (int64_t i = 0; i < of.queries; ++i) {
      const auto [begin, end] = seen(i, of, how);
      const float* row = &grads[i * v.width];
      const float along = dot(row, &outs[i * v.width], v.width);
      const float sum = logarithms[all.query_starts ? h * all.queries + of.query_first + i
                                                    : (b * q.heads + h) * all.queries + i];
      for (int64_t j = begin; j < end; ++j) {
        const float score = static_cast<float>(how.scale) * dot(&queries[i * q.width], &keys[j * q.width], q.width);
        const float weight = std::exp(score - sum), keep = kept(drawn, how.dropout, b, h, i, j);
        add(&value_grads[j * v.width], row, weight * keep, v.width);
        const float slope = weight * (keep * dot(row, &values[j * v.width], v.width) - along) *
            static_cast<float>(how.scale);
        add(&made[i * q.width], &keys[j * q.width], slope, q.width);
        add(&key_grads[j * q.width], &queries[i * q.width], slope, q.width);
      }
    }
    to_q.write(of.batch, of.query_first, h, made);
  };
  launch("attention_backward",
         {grad, query, key, value, out, sums, seeds, how.query_starts.value_or(Tensor()),
          how.key_starts.value_or(Tensor())},
         {dq, dk, dv}, [=] {
           const int64_t share = q.heads / k.heads;
           for (int64_t b = 0; b < all.batches; ++b) {
             const Sequence of = all.of(b);
             for (int64_t group = 0; group < k.heads; ++group) {
               const Floats keys = k.read(of.batch, of.key_first, of.keys, group);
               const Floats values = v.read(of.batch, of.key_first, of.keys, group);
               Floats key_grads(keys.size(), 0.0f), value_grads(values.size(), 0.0f);
               for (int64_t h = group * share; h < (group + 1) * share; ++h) {
                 one(b, h, of, keys, values, key_grads, value_grads);
               }
               to_k.write(of.batch, of.key_first, group, key_grads);
               to_v.write(of.batch, of.key_first, group, value_grads);
             }
           }
         });
  return {dq, dk, dv};
}

Tensor rotate(const Tensor& input, const Tensor& freqs, const std::string& format, bool interleaved, int64_t turn,
              std::optional<Tensor> starts) {
  const Tensor out = new_heads(input, input.size(-1));
  const Heads x = heads_of(input, format), y = heads_of(out, format);
  Attention how;
  how.format = format;
  how.query_starts = how.key_starts = starts;
  const Sequences all = sequences_of(input, input, how);
  const Elements angles = elements(freqs);
  launch("rotate", {input, freqs, starts.value_or(Tensor())}, {out}, [=] {
    const Floats radians = angles.read();
    const int64_t width = angles.columns;
    for (int64_t b = 0; b < all.batches; ++b) {
      const Sequence of = all.of(b);
      for (int64_t h = 0; h < x.heads; ++h) {
        Floats values = x.read(of.batch, of.query_first, of.queries, h);
        for (int64_t i = 0; i < of.queries; ++i) {
          float* row = &values[i * x.width];
          const Floats before(row, row + width);
          for (int64_t j = 0; j < width; ++j) {
            // the partner of each element: beside it, or half a row away
            const bool first = interleaved ? j % 2 == 0 : j < width / 2;
            const int64_t other = interleaved ? j ^ 1 : (j + width / 2) % width;
            // backward rotates by the angle at the partner's place
            const float angle = radians[i * width + (turn < 0 ? other : j)];
            row[j] = before[j] * std::cos(radians[i * width + j]) + (first ? -turn : turn) * before[other] *
                std::sin(angle);
          }
        }
        y.write(of.batch, of.query_first, h, values);
      }
    }
  });
  return out;
}

} // namespace stand_ins
