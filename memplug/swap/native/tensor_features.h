// What the operators that have read a tensor say of it: how it is found again in another step (Chameleon, appendix A).
#pragma once

#include <cstdint>

namespace memplug {

// Exact integers, compared as they are.
struct Features {
  uint32_t uses = 0; // by operators that read it
  uint32_t kinds = 0; // of those: a bit for each of the 32 that are run most often
  uint64_t recent = 0; // ranks of the last eight, a byte each, the latest lowest

  static constexpr int kKinds = 32;

  // `rank`: of the operator by how often it is run, from 1; 255 stands for all that are rarer than the 254th.
  void read_by(uint8_t rank) {
    ++uses;
    kinds |= rank >= 1 && rank <= kKinds ? 1u << (rank - 1) : 0;
    recent = recent << 8 | rank;
  }

  bool operator==(const Features&) const = default;
};

} // namespace memplug
