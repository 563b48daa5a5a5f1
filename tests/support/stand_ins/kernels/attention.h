// Attention that keeps no scores for backward, and rotary embeddings.
#pragma once
#include <string>

#include "launch.h"

namespace stand_ins {

// What a token may see, and how scores become weights.
struct Attention {
  std::string format;        // of all tensors: "sbhd", "bshd" or "thd" (packed)
  double scale = 1;
  bool causal = false;       // query i sees no key after i + shift,
  bool bottom_right = false; // where shift is 0, or keys minus queries
  int64_t left = -1;         // nor one more than so many before i + shift; -1: all
  double dropout = 0;
  std::optional<Tensor> query_starts, key_starts; // of "thd": int32, where each sequence begins, and the end
};

// Returns out as query (of value's head size), and the logarithm of the sum of exponentials, float: [b, h, s], or [h, t]
// of "thd"; with `stats` one dimension of 1 more, as cuDNN. `seeds`: int64[2], of dropout (`seeds`).
std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& seeds, const Attention& how, bool stats);
// Gradients of query, key and value: new ones, or in the memory that is given, of any strides.
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& sums,
                                                      const Tensor& seeds, const Attention& how,
                                                      std::optional<std::tuple<Tensor, Tensor, Tensor>> into);

// Of the CPU's default generator, whose state moves on; no operator shows it.
std::pair<int64_t, int64_t> next_random();

// int64[2] on the device of `like`, from which a kernel of attention knows what it drops.
Tensor seeds(const Tensor& like, int64_t first, int64_t second);

// x[s or t, b, h, d] or [b, s, h, d] rotated by freqs[s, 1, 1, r], r <= d; `turn` -1: backward. "thd" starts anew in
// each sequence.
Tensor rotate(const Tensor& input, const Tensor& freqs, const std::string& format, bool interleaved, int64_t turn,
              std::optional<Tensor> starts);

} // namespace stand_ins
