// A region: the plan's decisions for it, and the facts that its forwards have shown.
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

// The decision for an operator's output: the fraction of its rows to swap, in [0, 1], and whether to keep them on the
// device instead.
struct Decision {
  double fraction = 0;
  bool keep = false;
};

// The decisions for a region's operators. A setting never changes: a forward uses the one that it began with.
struct Setting {
  struct Planned {
    std::string op; // the planned operator's name, with its overload
    Decision decision;
  };

  // Returns the decision for the operator at `index`. Without a plan, or if another operator than the planned one runs
  // there, the decision follows from the operator's traits.
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

  // decisions by index of the operator; none before the first plan
  std::optional<std::unordered_map<size_t, Planned>> plan;
  bool is_agreed = false; // all ranks with which the region's units communicate use the same setting
  double rows = 0; // α: the fraction of each matmul output's rows to swap where no plan decides
  std::unordered_map<size_t, const Operator*> unneeded; // operators whose captured outputs no backward has asked for
};

// The present setting of a region, and the facts that its forwards have shown. Guarded by Python's lock.
struct Region {
  // Changes the setting from the next forward on.
  template <typename Change>
  void change(const Change& change) {
    auto changed = std::make_shared<Setting>(*setting);
    change(*changed);
    setting = std::move(changed);
  }

  // Stops capturing an operator's output, since no backward has asked for it.
  void leave_out(size_t index, const Operator* op) {
    if (const auto found = setting->unneeded.find(index); found == setting->unneeded.end() || found->second != op) {
      change([&](Setting& changed) { changed.unneeded[index] = op; });
    }
  }

  // Ends a step. Sets `offloads_late` if the region ran forward in the step and none of its tensors had to be released.
  // Returns the step's `given_bytes`.
  std::vector<int64_t> end_step() {
    offloads_late = forwards > 0 && !released;
    released = false;
    forwards = 0;
    sent_bytes = std::exchange(sending_bytes, 0);
    return std::exchange(given_bytes, {});
  }

  // Returns whether the next forward may both communicate and be opaque on this rank alone.
  bool may_stray() const {
    return !talks || (*talks && (opaque || is_undecided || !repeats));
  }

  explicit Region(std::string kind) : kind(std::move(kind)) {}

  // Returns a region with the same findings, without findings that belong to the setting, and with no forward in flight.
  std::shared_ptr<Region> copy() const {
    auto copied = std::make_shared<Region>(*this);
    copied->change([](Setting& changed) { changed.unneeded.clear(); });
    copied->sent_bytes = copied->sending_bytes = copied->forwards = copied->live = copied->peak = 0;
    copied->released = false;
    copied->given_bytes.clear();
    return copied;
  }

  std::string kind; // name of the module's class
  std::shared_ptr<const Setting> setting = std::make_shared<Setting>();
  // fingerprint of the tape that the plan was made from; none if that forward was opaque
  std::optional<uint64_t> planned_from;
  std::shared_ptr<const Tape> last; // tape of the last forward that was not opaque
  // the recompute pass's actions for the last forward that was not opaque; the next forward shares them if its tape and
  // captures are the same
  std::shared_ptr<const PassActions> decisions;
  std::optional<int64_t> forward_bytes; // bytes that one forward offloads under the plan
  int64_t sent_bytes = 0; // bytes offloaded during the last forward of the last step; 0 if that step had none
  int64_t sending_bytes = 0; // bytes offloaded during the last forward of this step
  bool swaps_input = true; // swap the region's inputs, rather than hold them on the device
  bool opaque = false;
  bool shares = false; // the region's units communicate, so all ranks capture the same outputs
  // a forward has run. Not set by one that was opaque only because of functions that are units from the next forward
  // on.
  bool seen = false;
  std::optional<bool> talks; // whether the region's forwards have communicated with other ranks; none before the first
  std::optional<bool> asks; // whether the region's forwards have asked for gradients themselves; none before the first
  // the last forward called a function that may or may not hide kernels: memplug does not know yet (hidden.py)
  bool is_undecided = false;
  bool repeats = false; // the last forward was verified against a template, and was not the region's first
  bool communicates = false; // recompute passes launch collectives, so all ranks must run the same passes
  int64_t forwards = 0; // number of forwards since the last step ended
  // in the last step, backward ran before the region's tensors had to be released, so in this step their copies out
  // wait until release
  bool offloads_late = false;
  bool released = false; // the region's tensors had to be released in this step
  // for each forward since the last step ended, the bytes of all tensors among its arguments
  std::vector<int64_t> given_bytes;
  int64_t live = 0, peak = 0; // number of the region's forwards in flight at present, and its peak
};

} // namespace memplug
