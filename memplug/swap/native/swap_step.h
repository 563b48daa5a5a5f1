// One step under a swap list: what its operators do to the tensors that the list names.
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
  int64_t found = 0, missed = 0; // targets, over all steps
  int64_t repeated = 0; // steps that were followed by their requests to the end, see repeated_step.h
};

// What has to be seen of operators.
enum class Sight : uint8_t { NOTHING, NUMBERS, TENSORS };

// Not of several threads at once. Of a list without targets it only knows what may leave where memory is short.
class SwapStep {
 public:
  SwapStep(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, c10::DeviceType device);

  void begin();
  bool end(); // false: the device has no room for some of what was away

  bool is_of(const std::shared_ptr<StorageSwapper>& swapper) const {
    return swapper_ == swapper;
  }

  bool is_running() const {
    return is_running_;
  }

  // What has to be seen of operators from now on; of those that are followed only the ones of that number, ANY: of all.
  static constexpr int32_t ANY = -1;
  std::pair<Sight, int32_t> sight() const;

  // Whether requests tell it anything.
  bool has_targets() const {
    return !plan_.targets.empty();
  }

  // The step, if it is followed.
  RepeatedStep* followed() {
    return is_running_ && repeated_.is_followed() ? &repeated_ : nullptr;
  }

  // A request is made, by the program or by what else trains; it was served; one that is no part of that was.
  void asked(int64_t nbytes, const void* stream);
  void served(const void* memory) {
    repeated_.served(memory);
  }
  void served_other(const void* memory) {
    repeated_.served_other(memory);
  }

  // An outermost operator of the calling thread begins, and ends. `is_in`: it has not ended, nor has its step.
  Moment enter();
  void leave(const Moment& moment);
  bool is_in(const Moment& moment) const;

  // It was followed, until it was another one: threads may be inside of operators that were not seen.
  bool has_departed() const {
    return has_departed_;
  }

  // Of an operator of the program no more is seen than that it begins.
  void began(int32_t number) {
    return_late(number);
  }

  // An outermost operator of the program begins.
  void tick(const at::RecordFunction& function, int32_t number, const Moment& moment);

  // An operator of the program begins, inside of the outermost one of that moment, and has ended.
  void read(const at::RecordFunction& function, int32_t number, const Moment& moment, bool outermost);
  void wrote(const at::RecordFunction& function, int32_t number, const Moment& moment);

  // One that is no part of it begins.
  void pass(const at::RecordFunction& function, int32_t number, const Moment& moment);

  // An outermost operator of the program has ended: what it was the last to use leaves.
  void done();

  // A request of the calling thread has failed so often, see relief.h.
  bool relieve(int64_t nbytes, int failures);

  SwapListCounters counters;

 private:
  // What happens to a target at a place.
  struct Turn {
    enum Kind : uint8_t { RESTORE, RELEASE, PREFETCH }; // in the order in which they happen
    int32_t place;
    Kind kind;
    int32_t target;
  };
  struct Idle {
    c10::Storage storage;
    int64_t nbytes, last_use;
  };

  // Calls `visit(tensor, slot)` for each tensor on the device.
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
  void see(const at::Tensor& tensor, const Moment& moment, bool made);
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
  Lasting lasting_;
  bool has_begun_ = false; // the program, in this step
  std::vector<Turn> turns_;
  std::vector<uint8_t> returned_outside_; // by target, in the last step that was not followed: with an operator outside of the program
  size_t next_turn_ = 0;
  RepeatedStep repeated_;
  std::vector<std::pair<int64_t, int32_t>> due_; // in a step that is followed: requests before a turn, and which
  std::vector<std::pair<int64_t, int32_t>> lates_; // the request that is the last one before targets that return late
  size_t next_late_ = 0;
  std::vector<int32_t> late_; // of them, those that the operator is about to use that has yet to begin
  int64_t moments_ = 0;
  std::vector<int64_t> running_; // moments of the outermost operators that run now
  std::vector<int8_t> collectives_; // by operator number; -1: not known yet
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_, anchors_;
  std::vector<std::pair<int32_t, c10::Storage>> leaving_; // when the operator that runs is done
  bool is_running_ = false, has_departed_ = false;
};

} // namespace memplug
