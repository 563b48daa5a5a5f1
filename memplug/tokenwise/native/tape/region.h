// What a plan says of one module that runs token-wise, and what its forwards have shown.
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

// Fraction of the rows of an operator's output to swap, [0, 1], and whether to keep it on the device instead.
struct Decision {
  double fraction = 0;
  bool keep = false;
};

// What is captured of a region's operators. It never changes: a forward has the one that it began with.
struct Setting {
  struct Planned {
    std::string op; // with its overload
    Decision decision;
  };

  // The plan is advice: a forward that runs other operators than the planned one is captured by kind.
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

  std::optional<std::unordered_map<size_t, Planned>> plan; // by index of the operator; none before there is one
  bool is_agreed = false; // the ranks that its units communicate with run it by the same setting
  double rows = 0; // fraction of the rows of every matmul's output to swap, where no plan says so
  std::unordered_map<size_t, const Operator*> unneeded; // no backward ever asked for these captured outputs
};

// Guarded by Python's lock.
struct Region {
  // From the next forward on.
  template <typename Change>
  void change(const Change& change) {
    auto changed = std::make_shared<Setting>(*setting);
    change(*changed);
    setting = std::move(changed);
  }

  // No backward ever asked for the operator's captured output.
  void leave_out(size_t index, const Operator* op) {
    if (const auto found = setting->unneeded.find(index); found == setting->unneeded.end() || found->second != op) {
      change([&](Setting& changed) { changed.unneeded[index] = op; });
    }
  }

  // A step is over. Whether its tensors stay until backward is found out; returns `given_bytes`.
  std::vector<int64_t> end_step() {
    offloads_late = forwards > 0 && !released;
    released = false;
    forwards = 0;
    sent_bytes = std::exchange(sending_bytes, 0);
    return std::exchange(given_bytes, {});
  }

  // Whether the next forward may be opaque on this rank alone, and talk to others.
  bool may_stray() const {
    return !talks || (*talks && (opaque || is_undecided || !repeats));
  }

  explicit Region(std::string kind) : kind(std::move(kind)) {}

  std::string kind; // the name of its class
  std::shared_ptr<const Setting> setting = std::make_shared<Setting>();
  std::optional<uint64_t> planned_from; // fingerprint of the tape that the plan was made from; none: it was opaque
  std::shared_ptr<const Tape> last; // of its last forward that was not opaque
  std::shared_ptr<const Decisions> decisions; // of its last recompute pass, for the next
  std::optional<int64_t> forward_bytes; // that one forward sends to the host by the plan
  int64_t sent_bytes = 0; // to the host, while the last forward of the last step ran; 0: there was none that could
  int64_t sending_bytes = 0; // likewise, of this step
  bool swaps_input = true; // else it is held
  bool opaque = false;
  bool shares = false; // it has units that communicate: whatever is to be captured of it is, on every rank
  bool seen = false; // it has run forward
  std::optional<bool> talks; // to other ranks, as far as its forwards have shown; none before the first
  std::optional<bool> asks; // for gradients in its own forward, as far as its forwards have shown; none before the first
  bool is_undecided = false; // its last forward called a function of which nothing could be told (hidden.py)
  bool repeats = false; // its last forward was verified against a template, and was not its first
  bool communicates = false; // its recompute passes launch collectives, which all ranks must do alike
  int64_t forwards = 0; // since a step ended
  // its backward ran before its tensors had to be released, so offloading waits until release
  bool offloads_late = false;
  bool released = false; // since that was found out, they had to go
  std::vector<int64_t> given_bytes; // of all tensors given to each of its forwards, in order, since a step ended
  int64_t live = 0, peak = 0; // forwards in flight: now, and the most at once
};

} // namespace memplug
