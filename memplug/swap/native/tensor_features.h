// Describes a tensor by the operators that have read it, to find it again in another step (Chameleon, appendix A).
#pragma once

#include <cstdint>

namespace memplug {

// A tensor's features. Two tensors look the same if all features are equal.
struct Features {
  uint32_t uses = 0; // operators that have read the tensor
  uint32_t kinds = 0; // a bit for each of the 32 most frequent operators: whether it has read the tensor
  uint64_t recent = 0; // ranks of the last eight operators that have read the tensor: a byte each, the latest lowest

  static constexpr int kKinds = 32;

  // Notes that an operator reads the tensor. `rank`: its rank by frequency, from 1; 255: any beyond the 254th.
  void read_by(uint8_t rank) {
    ++uses;
    kinds |= rank >= 1 && rank <= kKinds ? 1u << (rank - 1) : 0;
    recent = recent << 8 | rank;
  }

  bool operator==(const Features&) const = default;
};

} // namespace memplug
