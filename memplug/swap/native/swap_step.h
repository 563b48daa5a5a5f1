// A step under a swap list: swaps the listed tensors as operators use them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "finder.h"
#include "lasting.h"
#include "repeated_step.h"
#include "storage_swapper.h"
#include "tensors.h"
#include "torch_private.h"

namespace memplug {

struct SwapListCounters {
  int64_t steps = 0;
  int64_t found = 0, missed = 0; // numbers of targets (tensors of the list), summed over all steps
  int64_t repeated = 0; // steps that memplug followed from beginning to end, see repeated_step.h
};

// The facts that a step needs about operators: none, their numbers, or also their tensors.
enum class Sight : uint8_t { NOTHING, NUMBERS, TENSORS };

// Not thread-safe: `swap_mutex` guards it. With an empty list, the step only keeps track of the tensors that may leave
// if a request fails.
class SwapStep {
 public:
  SwapStep(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, c10::DeviceType device);

  void begin();
  bool end(); // false: the device has no room for some storages, which stay on the host

  bool is_of(const std::shared_ptr<StorageSwapper>& swapper) const {
    return swapper_ == swapper;
  }

  bool is_running() const {
    return is_running_;
  }

  // Returns which facts the step needs from now on, and about which operators: the number of one, or ANY.
  static constexpr int32_t ANY = -1;
  std::pair<Sight, int32_t> sight() const;

  // Returns whether the list has targets: only then do `asked`, `served` and `served_other` have to be called.
  bool has_targets() const {
    return !plan_.targets.empty();
  }

  // Returns the step's `RepeatedStep` if memplug follows this step (repeated_step.h), else null.
  RepeatedStep* followed() {
    return is_running_ && repeated_.is_followed() ? &repeated_ : nullptr;
  }

  // `asked` is called when the program or other training code makes a request, `served` when that request has been
  // served, and `served_other` when any other request has been served.
  void asked(int64_t nbytes, const void* stream);
  void served(const void* memory) {
    repeated_.served(memory);
  }
  void served_other(const void* memory) {
    repeated_.served_other(memory);
  }

  // `enter` and `leave` are called when an outermost operator of the calling thread begins and ends. `is_in` returns
  // whether this operator still runs, in the same step.
  OperatorMoment enter();
  void leave(const OperatorMoment& moment);
  bool is_in(const OperatorMoment& moment) const;

  // Returns whether memplug followed this step until it departed: threads may then be inside of operators that memplug
  // has not seen.
  bool has_departed() const {
    return has_departed_;
  }

  // Called when an operator of the program begins, if memplug sees only operators' numbers.
  void began(int32_t number) {
    return_late(number);
  }

  // Called when an outermost operator of the program begins.
  void tick(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment);

  // Called when an operator of the program begins, and when it ends; `moment` is that of its outermost operator.
  void read(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment, bool outermost);
  void wrote(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment);

  // Called when an operator outside of the program begins.
  void pass(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment);

  // Called when an outermost operator of the program has ended: offloads the targets whose last use it was.
  void done();

  // Called when a request of the calling thread has failed `failures` times, see relief.h. Returns whether memory was
  // freed.
  bool relieve(int64_t nbytes, int failures);

  SwapListCounters counters;

 private:
  // An action that is due on a target when the program reaches a place.
  struct Turn {
    enum TurnKind : uint8_t { RESTORE, RELEASE, PREFETCH }; // in the order of actions that are due at one place
    int32_t place;
    TurnKind kind;
    int32_t target;
  };
  struct Idle {
    c10::Storage storage;
    int64_t nbytes, last_use;
  };

  // Calls `visit(tensor, slot)` for each tensor in `values` that is on the device.
  template <typename Values, typename Visit>
  void each_storage(const Values& values, const Visit& visit) const {
    int32_t slot = 0;
    for (const c10::IValue& value : values) {
      each_tensor_or_number(value, [&](const at::Tensor& tensor) {
        if (tensor.has_storage() && tensor.device().type() == device_) {
          visit(tensor, slot++);
        }
      });
    }
  }
  void leave_at_the_beginning();
  void take(const Turn& turn);
  void take_until(int32_t place, bool outside);
  bool is_away(const at::RecordFunction& function) const;
  void see(const at::Tensor& tensor, const OperatorMoment& moment, bool made);
  template <typename Values>
  void find(const Values& values, int32_t number, bool output);
  void match(c10::ArrayRef<c10::IValue> values, int32_t number, bool output);
  void use(const at::RecordFunction& function);
  void follow();
  void take_due();
  void return_late(int32_t number);
  void return_outside(const at::RecordFunction& function);
  void depart();
  bool is_collective(const at::RecordFunction& function, int32_t number);
  std::vector<Idle> idle() const;

  const SwapListPlan plan_;
  const std::shared_ptr<StorageSwapper> swapper_;
  const c10::DeviceType device_;
  Finder finder_;
  LastingTensors lasting_;
  bool has_begun_ = false; // whether the program's first operator of this step has begun
  std::vector<Turn> turns_;
  // by target: whether its last restore was for an operator outside of the program
  std::vector<uint8_t> returned_outside_;
  size_t next_turn_ = 0;
  RepeatedStep repeated_;
  // in a followed step: (request, index of a turn that is due at it), sorted
  std::vector<std::pair<int64_t, int32_t>> due_;
  // late targets, see `follow`: (last request before the target's next use, target), sorted
  std::vector<std::pair<int64_t, int32_t>> lates_;
  size_t next_late_ = 0;
  std::vector<int32_t> late_; // late targets that the coming operators may use
  int64_t moments_ = 0;
  std::vector<int64_t> running_; // `OperatorMoment::number` of each outermost operator that runs now
  std::vector<int8_t> collectives_; // by operator number: whether it is a collective; -1: not known yet
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_, anchors_;
  std::vector<std::pair<int32_t, c10::Storage>> leaving_; // targets to offload when the running operator is done
  bool is_running_ = false, has_departed_ = false;
};

} // namespace memplug
