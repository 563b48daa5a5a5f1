// A module that runs token-wise: the plan's decisions for it, and what its forwards have shown.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "decisions.h"
#include "operators.h"
#include "tape.h"

namespace memplug {

// The fraction of the rows of an operator's output to swap, [0, 1], and whether to keep it on the device instead.
struct Decision {
  double fraction = 0;
  bool keep = false;
};

// The decisions for a region's operators. It never changes: a forward uses the one that it began with.
struct Setting {
  struct Planned {
    std::string op; // with its overload
    Decision decision;
  };

  // Returns the decision for an operator. The plan is advice: an operator that differs from the planned one is captured
  // by its kind.
  Decision decide(size_t index, const Operator& op) const {
    if (is_unneeded(index, op)) {
      return {};
    }
    if (op.has(SHARED) && !is_agreed) {
      return {1.0, false};
    }
    if (plan && !op.is_always_captured()) {
      const auto found = plan->find(index);
      if (found == plan->end()) {
        return {};
      }
      if (found->second.op == op.name) {
        return found->second.decision;
      }
    }
    return {op.has(ROWS) ? rows : op.is_expensive() ? 1.0 : 0.0, false};
  }
  bool is_unneeded(size_t index, const Operator& op) const {
    const auto found = unneeded.find(index);
    return found != unneeded.end() && found->second == &op;
  }

  std::optional<std::unordered_map<size_t, Planned>> plan; // by index of the operator; none until there is one
  bool is_agreed = false; // all ranks that its units communicate with use the same setting
  double rows = 0; // fraction of each matmul output's rows to swap, unless a plan decides
  std::unordered_map<size_t, const Operator*> unneeded; // no backward has asked for these captured outputs
};

// The present setting of a region, and what its forwards have shown. Guarded by Python's lock.
struct Region {
  // Changes the setting from the next forward on.
  template <typename Change>
  void change(const Change& change) {
    auto changed = std::make_shared<Setting>(*setting);
    change(*changed);
    setting = std::move(changed);
  }

  // Excludes an operator's output from later captures: no backward has asked for it.
  void leave_out(size_t index, const Operator* op) {
    if (const auto found = setting->unneeded.find(index); found == setting->unneeded.end() || found->second != op) {
      change([&](Setting& changed) { changed.unneeded[index] = op; });
    }
  }

  // Ends a step: from what it showed, decides whether tensors stay on the device until backward (`offloads_late`).
  // Returns `given_bytes`.
  std::vector<int64_t> end_step() {
    offloads_late = forwards > 0 && !released;
    released = false;
    forwards = 0;
    sent_bytes = std::exchange(sending_bytes, 0);
    return std::exchange(given_bytes, {});
  }

  // Returns whether the next forward may be opaque on this rank alone and communicate with other ranks.
  bool may_stray() const {
    return !talks || (*talks && (opaque || is_undecided || !repeats));
  }

  explicit Region(std::string kind) : kind(std::move(kind)) {}

  std::string kind; // the name of its class
  std::shared_ptr<const Setting> setting = std::make_shared<Setting>();
  std::optional<uint64_t> planned_from; // fingerprint of the tape that the plan was made from; none: it was opaque
  std::shared_ptr<const Tape> last; // tape of the last forward that was not opaque
  std::shared_ptr<const PassActions> decisions; // of the last recompute pass, for the next one
  std::optional<int64_t> forward_bytes; // that the plan has one forward offload
  int64_t sent_bytes = 0; // offloaded during the last forward of the last step; 0: there was none
  int64_t sending_bytes = 0; // likewise, in this step
  bool swaps_input = true; // else the input is held
  bool opaque = false;
  bool shares = false; // its units communicate, so all ranks capture the same outputs
  bool seen = false; // it has run forward
  std::optional<bool> talks; // whether its forwards have communicated with other ranks; none before the first
  std::optional<bool> asks; // whether they have asked for gradients themselves; none before the first
  // its last forward called a function that may hide kernels, which is not known yet (hidden.py)
  bool is_undecided = false;
  bool repeats = false; // its last forward was verified against a template, and was not its first
  bool communicates = false; // its recompute passes launch collectives, which all ranks must do alike
  int64_t forwards = 0; // since the last step ended
  // its backward ran before its tensors had to be released, so offloading waits until release
  bool offloads_late = false;
  bool released = false; // its tensors had to be released in this step
  std::vector<int64_t> given_bytes; // bytes of all tensors given to each forward, in order, since a step ended
  int64_t live = 0, peak = 0; // forwards in flight: now, and at most
};

} // namespace memplug
