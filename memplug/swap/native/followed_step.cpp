// Swaps a list's tensors in a followed step (repeated_step.h): its requests for memory show how far the step has come,
// and memplug sees only a few of its operators.
#include <algorithm>
#include <optional>
#include <utility>

#include "swap_step.h"

namespace memplug {

// Begins to follow the step: finds the request at which each turn (`Turn`: a release, prefetch or restore) is due.
//
// A release or prefetch is due at the first request after the operator at its place has begun. A restore must come
// before the operator of the tensor's next use, so it is due at the last request before that operator. If no request
// comes between a tensor's prefetch and its next use, the tensor is late: memplug watches for the operator of the next
// use, and restores the tensor as that operator begins.
void SwapStep::follow() {
  if (due_.empty()) {
    lates_.clear();
    const std::vector<int64_t>& after = repeated_.turns();
    std::vector<int64_t> prefetches(plan_.targets.size(), 0);
    for (size_t i = 0; i < turns_.size(); ++i) {
      // all prefetches first: at one place, `turns_` has a restore before a prefetch
      if (turns_[i].kind == Turn::PREFETCH) {
        prefetches[turns_[i].target] = after[i] < 0 ? INT64_MAX : after[i];
      }
    }
    for (size_t i = 0; i < turns_.size(); ++i) {
      const Turn& turn = turns_[i];
      int64_t requests = after[i] < 0 ? INT64_MAX : after[i];
      if (turn.kind == Turn::RESTORE && after[i] >= 0) {
        if (prefetches[turn.target] < requests) {
          // request 0 at the earliest, at which `leave_at_the_beginning` offloads
          requests = std::max<int64_t>(requests - 1, 0);
        } else {
          lates_.emplace_back(requests - 1, turn.target);
          repeated_.expect(requests - 1);
        }
      }
      due_.emplace_back(requests, static_cast<int32_t>(i));
      repeated_.expect(requests);
    }
    std::stable_sort(due_.begin(), due_.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
    std::sort(lates_.begin(), lates_.end());
  }
  repeated_.expect(0);
  take_due();
}

std::pair<Sight, int32_t> SwapStep::sight() const {
  if (!is_running_ || !repeated_.is_followed()) {
    return {is_running_ ? Sight::TENSORS : Sight::NOTHING, ANY};
  }
  Sight seen = Sight::NOTHING;
  std::optional<int32_t> awaited;
  const auto await = [&](Sight least, int32_t number) {
    seen = std::max(seen, least);
    awaited = awaited.value_or(number) == number ? number : ANY;
  };
  for (const int32_t target : repeated_.open()) {
    await(Sight::TENSORS, plan_.targets[target].operator_number);
  }
  for (const int32_t target : late_) {
    if (returned_outside_[target]) { // the next use is outside of the program, by an unknown operator
      await(Sight::TENSORS, ANY);
    } else {
      await(Sight::NUMBERS, plan_.program[plan_.targets[target].next_use]);
    }
  }
  return {seen, awaited.value_or(ANY)};
}

void SwapStep::asked(int64_t nbytes, const void* stream) {
  if (!is_running_) {
    return;
  }
  if (repeated_.is_followed() && repeated_.follow(nbytes, stream)) {
    leave_at_the_beginning();
    take_due();
    return;
  }
  if (repeated_.is_followed()) {
    depart();
  }
  repeated_.learn_request(nbytes, stream, finder_.now());
}

void SwapStep::take_due() {
  const int64_t request = repeated_.last_request();
  for (; next_turn_ < due_.size() && due_[next_turn_].first <= request; ++next_turn_) {
    take(turns_[due_[next_turn_].second]);
  }
  late_.clear(); // tensors that were late at an earlier request are back by now
  for (; next_late_ < lates_.size() && lates_[next_late_].first <= request; ++next_late_) {
    if (lates_[next_late_].first == request) {
      late_.push_back(lates_[next_late_].second);
    }
  }
}

// Called as an operator begins: restores the late tensors whose planned next use is by an operator with this number.
void SwapStep::return_late(int32_t number) {
  const auto is_user = [&](int32_t target) {
    const auto place = static_cast<size_t>(plan_.targets[target].next_use);
    return place < plan_.program.size() && plan_.program[place] == number; // else the next use comes after the program
  };
  for (const int32_t target : late_) {
    if (is_user(target)) {
      swapper_->prefetch(target);
      swapper_->restore(target);
    }
  }
  late_.erase(std::remove_if(late_.begin(), late_.end(), is_user), late_.end());
}

// Called as an operator outside of the program begins: restores all late tensors if the operator uses a tensor that is
// away.
void SwapStep::return_outside(const at::RecordFunction& function) {
  if (late_.empty() || !is_away(function)) {
    return;
  }
  for (const int32_t target : std::exchange(late_, {})) {
    swapper_->prefetch(target);
    swapper_->restore(target);
  }
}

// Stops following the step. From here on memplug sees all operators, but it does not know the features
// (tensor_features.h) of tensors that were used earlier in the step.
void SwapStep::depart() {
  has_departed_ = true;
  finder_.move_to(repeated_.place());
  repeated_.depart();
  leaving_.clear();
  late_.clear();
  next_turn_ = 0; // goes through all turns again: the swapper ignores those that it has already done
}

// Finds targets among an operator's tensors by their learnt last uses (`RepeatedStep::open`), and has them offloaded
// when the operator ends.
void SwapStep::match(c10::ArrayRef<c10::IValue> values, int32_t number, bool output) {
  if (repeated_.open().empty()) {
    return;
  }
  each_storage(values, [&](const at::Tensor& tensor, int32_t slot) {
    for (const int32_t index : repeated_.open()) {
      const SwapTarget& target = plan_.targets[index];
      if (target.operator_number == number && (target.output != 0) == output && target.slot == slot &&
          target.nbytes == static_cast<int64_t>(tensor.storage().nbytes()) && repeated_.is_of(index, tensor.storage())) {
        repeated_.close(index, tensor.storage());
        finder_.note_found(index);
        leaving_.emplace_back(index, tensor.storage());
        return;
      }
    }
  });
}

} // namespace memplug
