// Finds the tensors of a swap list in a step as it runs; of tensors it knows no more than an identity, a size and a dtype.
//
// The clock is the program's outermost operators (program_clock.h). A tensor is found at its last use by its features
// (features.h), its size, its dtype, the operator that uses it and its place among that one's tensors, near where it was in
// the planned step: nearer than half way to the next one that looks the same there. No match is better than a wrong one.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "features.h"
#include "program_clock.h"

namespace memplug {

// Packed as TARGET in memplug/swap/tables.py. Places are outermost operators of the program.
#pragma pack(push, 1)
struct SwapTarget {
  int64_t nbytes;
  int32_t dtype; // c10::ScalarType, of the first tensor seen in the storage
  int32_t operator_number; // that uses it last; given by name in Python
  uint8_t output; // of that operator, else an input
  int32_t slot; // its number among the operator's tensors of that kind
  uint32_t uses, kinds; // Features, that use included
  uint64_t recent;
  int32_t tolerance; // places by which it may be off
  int32_t last_use, release, prefetch, next_use;
};
#pragma pack(pop)

struct SwapListPlan {
  std::vector<int32_t> program; // numbers of its operators
  std::vector<uint8_t> ranks; // by number, see `Features::read_by`; 255 beyond the end
  std::vector<SwapTarget> targets; // by last use, rising
  int64_t min_bytes = 0; // smaller storages are not looked at
};

class Finder {
 public:
  explicit Finder(const SwapListPlan& plan) : plan_(plan), found_(plan.targets.size()) {
    clock_.load(plan.program);
  }

  // A step begins.
  void begin() {
    clock_.begin();
    seen_.clear();
    std::fill(found_.begin(), found_.end(), false);
    next_ = 0;
  }

  // An outermost operator begins; returns its place in the planned step.
  int32_t tick(int32_t number) {
    return clock_.tick(number);
  }

  // A storage is met. Whether it was not met before.
  bool see(const void* storage, int64_t nbytes, int32_t dtype) {
    return nbytes >= plan_.min_bytes && seen_.emplace(storage, Seen{{}, dtype}).second;
  }

  // An operator of that number reads it.
  void read(const void* storage, int32_t number) {
    const auto seen = seen_.find(storage);
    if (seen != seen_.end()) {
      seen->second.features.read_by(
          number < static_cast<int32_t>(plan_.ranks.size()) ? plan_.ranks[number] : UINT8_MAX);
    }
  }

  // The target that an operator's tensor is, in that slot of its inputs or outputs; -1: none.
  int32_t find(const void* storage, int64_t nbytes, int32_t number, bool output, int32_t slot) {
    if (clock_.is_lost()) {
      return -1;
    }
    const int32_t place = clock_.now();
    const auto& targets = plan_.targets;
    while (next_ < targets.size() && targets[next_].last_use < place - ProgramClock::kReach) {
      ++next_;
    }
    for (size_t i = next_; i < targets.size() && targets[i].last_use <= place + ProgramClock::kReach; ++i) {
      const SwapTarget& target = targets[i];
      if (!found_[i] && target.operator_number == number && (target.output != 0) == output && target.slot == slot &&
          target.nbytes == nbytes && std::abs(target.last_use - place) + clock_.error() <= target.tolerance && looks(target, storage)) {
        found_[i] = true;
        return static_cast<int32_t>(i);
      }
    }
    return -1;
  }

  // Whether any may still be found.
  bool is_looking() const {
    return next_ < plan_.targets.size();
  }

  int64_t found() const {
    return std::count(found_.begin(), found_.end(), true);
  }

 private:
  struct Seen {
    Features features;
    int32_t dtype;
  };

  bool looks(const SwapTarget& target, const void* storage) const {
    const auto seen = seen_.find(storage);
    return seen != seen_.end() && seen->second.dtype == target.dtype &&
        seen->second.features == Features{target.uses, target.kinds, target.recent};
  }

  const SwapListPlan& plan_;
  ProgramClock clock_;
  std::vector<bool> found_;
  size_t next_ = 0;
  ska::flat_hash_map<const void*, Seen> seen_;
};

} // namespace memplug
