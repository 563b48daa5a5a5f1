// Finds the targets, which are the tensors of a swap list, in a running step. The finder never dereferences a storage:
// its callers pass the address, size and dtype.
//
// A clock counts the program's outermost operators, which are those that no other operator calls (program_clock.h). The
// finder recognizes a target at its last use before it is offloaded. It compares the tensor's features
// (tensor_features.h), size and dtype, the operator that uses the tensor, and the tensor's slot, which is its number
// among that operator's inputs or outputs. The use must also be close to the planned place: closer than half the
// distance to the next tensor that looks the same. Finding no tensor is better than finding a wrong one.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tensor_features.h"
#include "program_clock.h"

namespace memplug {

// A target. Same layout as TARGET in memplug/swap/tables.py. A place is the index of an outermost operator in the
// program.
#pragma pack(push, 1)
struct SwapTarget {
  int64_t nbytes;
  int32_t dtype; // c10::ScalarType of the first tensor seen in the storage
  int32_t operator_number; // number of the operator of the last use (operator_names.h)
  uint8_t output; // 1: the tensor is an output of that operator; 0: it is an input
  int32_t slot; // the tensor's number among the operator's outputs, or inputs
  uint32_t uses, kinds; // with `recent`: the tensor's Features after its last use
  uint64_t recent;
  int32_t tolerance; // greatest distance, in places, of the actual last use from the planned one
  // Places of the last use before the tensor leaves, of its release, of its prefetch and of its next use. If `last_use`
  // is -1, the tensor leaves as the step begins. If `next_use` is the program's length, the program does not use the
  // tensor again.
  int32_t last_use, release, prefetch, next_use;
  int32_t key; // if `last_use` is -1: `Anchor::key` of the tensor; else -1
};
#pragma pack(pop)

// An anchor: the operator at `place` reads a tensor that outlives the step. Places from the program's length on are
// those of the operators in `SwapListPlan::outside`, in order. Same layout as ANCHOR in memplug/swap/tables.py.
#pragma pack(push, 1)
struct Anchor {
  int32_t place, slot; // slot: the tensor's number among the operator's inputs
  int32_t key; // the same for all anchors of one tensor
};
#pragma pack(pop)

struct SwapListPlan {
  std::vector<int32_t> program; // numbers of the program's outermost operators, in order
  // sequences of operators outside of the program: (place of the last program operator before them, their numbers)
  std::vector<std::pair<int32_t, std::vector<int32_t>>> outside;
  std::vector<uint8_t> ranks; // by operator number: its rank, see `Features::read_by`; beyond the end: 255
  std::vector<SwapTarget> targets; // sorted by last use
  std::vector<Anchor> anchors; // sorted by place
  int64_t min_bytes = 0; // smaller storages are ignored
  std::vector<std::string> collectives; // prefixes of the names of collectives
};

// One run of an outermost operator. `number` counts such runs on all threads, from 1; `stream` is the number of the
// run's stream.
struct OperatorMoment {
  int64_t number = 0, stream = 0;
};

class Finder {
 public:
  explicit Finder(const SwapListPlan& plan) : plan_(plan), found_(plan.targets.size()) {
    clock_.load(plan.program);
    for (const Anchor& anchor : plan.anchors) {
      places_[anchor.key].push_back(anchor.place);
    }
  }

  // Begins a step. `lives(storage)` returns whether a storage that an earlier step made is still alive.
  template <typename Lives>
  void begin(const Lives& lives) {
    if (keys_.empty() && clock_.is_true() && clock_.is_at_end()) {
      keys_ = learnt_;
    }
    learnt_.clear();
    clock_.begin();
    ska::flat_hash_map<const void*, Seen> former;
    std::swap(former, seen_);
    for (auto& [storage, seen] : former) {
      if (seen.is_made && lives(storage)) {
        seen.features = {};
        seen_.emplace(storage, seen);
      }
    }
    std::fill(found_.begin(), found_.end(), false);
    next_ = 0;
  }

  // Returns whether this step has used the storage, or an earlier step has made it.
  bool knows(const void* storage) const {
    return seen_.find(storage) != seen_.end();
  }

  // `move_to` sets the clock to a place; `note_found` marks a target as found.
  void move_to(int32_t place) {
    clock_.move_to(place);
  }
  void note_found(int32_t target) {
    found_[target] = true;
  }

  // Notes that an outermost operator begins.
  void tick(int32_t number) {
    clock_.tick(number);
  }

  // Returns the clock's place.
  int32_t now() const {
    return clock_.now();
  }

  // Notes that the outermost operator at the clock's place reads a storage as its input `slot`. In the first step that
  // runs exactly as planned, the finder learns the anchors' storages, such as parameters. In later steps, a read of
  // such a storage sets the clock. Returns whether this call has learnt the storage.
  bool anchor(const void* storage, int32_t slot, int32_t number) {
    const auto known = keys_.find(storage);
    if (known != keys_.end()) {
      const int32_t place = clock_.nearest(places_.at(known->second), number);
      if (place >= 0) {
        clock_.move_to(place);
      }
      return false;
    }
    if (!keys_.empty() || !clock_.is_true()) {
      return false;
    }
    const auto& anchors = plan_.anchors;
    auto here = std::lower_bound(anchors.begin(), anchors.end(), clock_.now(), [](const Anchor& one, int32_t place) {
      return one.place < place;
    });
    for (; here != anchors.end() && here->place == clock_.now(); ++here) {
      if (here->slot == slot) {
        return learnt_.emplace(storage, here->key).second;
      }
    }
    return false;
  }

  // Notes that an operator of the program uses a storage; returns whether the storage is new to the finder. `made`
  // matters only for a new storage: true if this operator, or one that it runs inside of, made the storage.
  bool see(const void* storage, int64_t nbytes, int32_t dtype, const OperatorMoment& now, bool made = false) {
    if (nbytes != 0 && nbytes < plan_.min_bytes) { // a storage without memory may get some later
      return false;
    }
    const auto [seen, fresh] = seen_.emplace(storage, Seen{{}, nbytes, dtype, now.stream, now.number, made});
    seen->second.nbytes = std::max(seen->second.nbytes, nbytes); // other code may empty a storage for a while
    seen->second.use(now);
    return fresh;
  }

  // Notes that an operator outside of the program, or a collective, uses a storage.
  void pass(const void* storage, const OperatorMoment& now, bool collective) {
    const auto seen = seen_.find(storage);
    if (seen != seen_.end()) {
      seen->second.use(now);
      seen->second.is_shared |= collective;
    }
  }

  // Returns an idle storage's bytes, and the `OperatorMoment::number` of its last use; {0, 0} if the storage is not
  // idle. An idle storage was made by the program, in any step, and last used before `now`. No collective has used it,
  // and no stream other than that of `now`.
  std::pair<int64_t, int64_t> idle(const void* storage, const OperatorMoment& now) const {
    const auto seen = seen_.find(storage);
    if (seen == seen_.end() || !seen->second.is_made || seen->second.is_shared || seen->second.stream != now.stream ||
        seen->second.last_use >= now.number) {
      return {0, 0};
    }
    return {seen->second.nbytes, seen->second.last_use};
  }

  // Notes that the operator with this number reads the storage.
  void read(const void* storage, int32_t number) {
    const auto seen = seen_.find(storage);
    if (seen != seen_.end()) {
      seen->second.features.read_by(
          number < static_cast<int32_t>(plan_.ranks.size()) ? plan_.ranks[number] : UINT8_MAX);
    }
  }

  // Returns whether a tensor of the operator with this number may be a target now: an output if `output`, else an
  // input.
  bool expects(int32_t number, bool output) {
    const auto& targets = plan_.targets;
    const int32_t place = clock_.now();
    while (next_ < targets.size() && targets[next_].last_use < place - ProgramClock::kReach) {
      ++next_;
    }
    for (size_t i = next_; i < targets.size() && targets[i].last_use <= place + ProgramClock::kReach; ++i) {
      if (!found_[i] && targets[i].operator_number == number && (targets[i].output != 0) == output) {
        return !clock_.is_lost();
      }
    }
    return false;
  }

  // Returns the index of the target that the storage belongs to; -1: none. Call it only if `expects` has returned true.
  // `slot` is the tensor's number among the operator's outputs if `output`, else among its inputs.
  int32_t find(const void* storage, int64_t nbytes, int32_t number, bool output, int32_t slot) {
    const int32_t place = clock_.now();
    const auto& targets = plan_.targets;
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

  int64_t found() const {
    return std::count(found_.begin(), found_.end(), true);
  }

 private:
  struct Seen {
    Features features;
    int64_t nbytes;
    int32_t dtype;
    int64_t stream; // stream of its first use
    int64_t last_use; // `OperatorMoment::number` of its last use
    bool is_made; // whether the program made the storage
    bool is_shared = false; // another stream or a collective has used the storage, and the end of that use is unknown

    void use(const OperatorMoment& now) {
      last_use = now.number;
      is_shared |= stream != now.stream;
    }
  };

  bool looks(const SwapTarget& target, const void* storage) const {
    const auto seen = seen_.find(storage);
    return seen != seen_.end() && !seen->second.is_shared && seen->second.dtype == target.dtype &&
        seen->second.features == Features{target.uses, target.kinds, target.recent};
  }

  const SwapListPlan& plan_;
  ProgramClock clock_;
  std::vector<bool> found_;
  size_t next_ = 0;
  ska::flat_hash_map<const void*, Seen> seen_;
  // by storage: `Anchor::key`. `learnt_` has the storages learnt in this step; if the step runs as planned, they become
  // `keys_`
  ska::flat_hash_map<const void*, int32_t> keys_, learnt_;
  ska::flat_hash_map<int32_t, std::vector<int32_t>> places_; // by `Anchor::key`: the places of its anchors
};

} // namespace memplug
