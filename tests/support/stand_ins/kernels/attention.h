// Attention that saves no scores for backward, and rotary embeddings.
#pragma once
#include <string>

#include "launch.h"

namespace stand_ins {

// The tokens that a token may see, and how scores become weights.
struct Attention {
  std::string format;        // of all tensors: "sbhd", "bshd" or "thd" (packed)
  double scale = 1;
  bool causal = false;       // query i sees no key after i + shift
  bool bottom_right = false; // shift is the number of keys minus the number of queries, else 0
  int64_t left = -1;         // query i sees no key before i + shift - left; -1: no such limit
  double dropout = 0;
  std::optional<Tensor> query_starts, key_starts; // for "thd": int32, the start of each sequence, and the end
};

// Returns out, shaped like query (with value's head size), and the logarithm of the sum of exponentials, float: [b, h,
// s], or [h, t] for "thd"; with `stats`, one more dimension of 1, as cuDNN returns it. `seeds`: int64[2], for dropout
// (see `seeds`).
std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const Tensor& seeds, const Attention& how, bool stats);
// Returns the gradients of query, key and value, in new tensors or in `into`, of any strides.
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& sums,
                                                      const Tensor& seeds, const Attention& how,
                                                      std::optional<std::tuple<Tensor, Tensor, Tensor>> into);

// Draws two numbers from the CPU's default generator and advances it; no operator shows it.
std::pair<int64_t, int64_t> next_random();

// Returns int64[2] on the device of `like`; a kernel of attention derives from it which weights it drops.
Tensor seeds(const Tensor& like, int64_t first, int64_t second);

// Rotates x[s or t, b, h, d] or [b, s, h, d] by freqs[s, 1, 1, r], r <= d; `turn` -1: backward. "thd" starts anew in
// each sequence.
Tensor rotate(const Tensor& input, const Tensor& freqs, const std::string& format, bool interleaved, int64_t turn,
              std::optional<Tensor> starts);

} // namespace stand_ins
