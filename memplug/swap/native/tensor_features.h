// Describes a tensor by the operators that have read it, to find it again in another step (Chameleon, appendix A).
#pragma once

#include <cstdint>

namespace memplug {

// A tensor's features. Two tensors look the same if all features are equal.
struct Features {
  uint32_t uses = 0; // number of operators that have read the tensor
  uint32_t kinds = 0; // one bit for each of the 32 most frequent operators: set if that operator has read the tensor
  uint64_t recent = 0; // ranks of the last eight operators that have read the tensor: a byte each, the latest lowest

  static constexpr int kKinds = 32;

  // Notes that an operator reads the tensor. `rank`: the operator's rank by frequency in the program, from 1; 255: any
  // rank above 254.
  void read_by(uint8_t rank) {
    ++uses;
    kinds |= rank >= 1 && rank <= kKinds ? 1u << (rank - 1) : 0;
    recent = recent << 8 | rank;
  }

  bool operator==(const Features&) const = default;
};

} // namespace memplug
