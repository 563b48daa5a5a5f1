#include "swap_step.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "clock.h"

namespace memplug {

SwapStep::SwapStep(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, c10::DeviceType device)
    : plan_(std::move(plan)), swapper_(std::move(swapper)), device_(device), finder_(plan_), lasting_(plan_) {
  for (size_t i = 0; i < plan_.targets.size(); ++i) {
    const SwapTarget& target = plan_.targets[i];
    const auto index = static_cast<int32_t>(i);
    turns_.push_back({target.release, Turn::RELEASE, index});
    turns_.push_back({target.prefetch, Turn::PREFETCH, index});
    turns_.push_back({target.next_use, Turn::RESTORE, index});
  }
  returned_outside_.assign(plan_.targets.size(), 1); // assumed until a step shows otherwise
  std::stable_sort(turns_.begin(), turns_.end(), [](const Turn& one, const Turn& other) {
    return std::pair(one.place, one.kind) < std::pair(other.place, other.kind);
  });
}

void SwapStep::begin() {
  repeated_.begin(plan_.targets.size(), turns_.size());
  next_turn_ = next_late_ = 0;
  late_.clear();
  if (repeated_.is_followed()) {
    alive_.clear(); // in a followed step memplug does not see the uses of these storages
    follow();
  } else {
    due_.clear();
  }
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> alive;
  ska::flat_hash_map<const void*, bool> lives;
  for (const auto& weak : alive_) {
    if (auto storage = weak.lock()) {
      lives[storage.get()] = true;
      alive.push_back(std::move(storage));
    }
  }
  finder_.begin([&](const void* storage) { return lives.find(storage) != lives.end(); });
  alive_.clear();
  for (const auto& storage : alive) {
    if (finder_.knows(storage.get())) {
      alive_.emplace_back(storage);
    }
  }
  leaving_.clear();
  running_.clear();
  lasting_.begin(-1);
  has_begun_ = has_departed_ = false;
  is_running_ = true;
}

bool SwapStep::end() {
  if (is_running_) {
    swapper_->end_step();
    const auto all = static_cast<int64_t>(plan_.targets.size());
    counters.found += finder_.found();
    counters.missed += all - finder_.found();
    ++counters.steps;
    counters.repeated += repeated_.is_followed();
    repeated_.end(finder_.found() == all && all > 0);
  }
  is_running_ = false;
  leaving_.clear();
  return swapper_->restore_all();
}

OperatorMoment SwapStep::enter() {
  running_.push_back(++moments_);
  return {moments_, swapper_->current_stream()};
}

void SwapStep::leave(const OperatorMoment& moment) {
  running_.erase(std::remove(running_.begin(), running_.end(), moment.number), running_.end());
}

bool SwapStep::is_in(const OperatorMoment& moment) const {
  return std::find(running_.begin(), running_.end(), moment.number) != running_.end();
}

void SwapStep::tick(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment) {
  swapper_->mark_operator(true);
  if (plan_.targets.empty() || repeated_.is_followed()) {
    return;
  }
  leave_at_the_beginning();
  repeated_.learn_operator(moment.stream);
  finder_.tick(number);
  lasting_.begin(finder_.now());
  each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t slot) {
    if (finder_.anchor(tensor.storage().unsafeGetStorageImpl(), slot, number)) {
      anchors_.push_back(tensor.storage().getWeakStorageImpl()); // keeps the storage's address from being reused
    }
  });
  take_until(finder_.now(), false);
}

// A nested operator may read a tensor that is new to memplug. Such a tensor counts as made inside of the outermost
// operator, by an operator that torch does not show.
void SwapStep::read(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment, bool outermost) {
  if (repeated_.is_followed()) {
    return_late(number);
    match(function.inputs(), number, false);
    return;
  }
  const bool collective = is_collective(function, number);
  each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t) {
    see(tensor, moment, !outermost);
    const auto* const storage = tensor.storage().unsafeGetStorageImpl();
    finder_.read(storage, number);
    if (collective) {
      finder_.pass(storage, moment, true);
    }
  });
  use(function);
  find(function.inputs(), number, false);
}

void SwapStep::wrote(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment) {
  if (repeated_.is_followed()) {
    match(function.outputs(), number, true);
    return;
  }
  const bool collective = is_collective(function, number);
  each_storage(function.outputs(), [&](const at::Tensor& tensor, int32_t) {
    see(tensor, moment, true);
    if (collective) {
      finder_.pass(tensor.storage().unsafeGetStorageImpl(), moment, true);
    }
  });
  find(function.outputs(), number, true);
}

void SwapStep::pass(const at::RecordFunction& function, int32_t number, const OperatorMoment& moment) {
  if (repeated_.is_followed()) {
    return_outside(function);
    return;
  }
  const bool collective = is_collective(function, number), is_counted = trains_unsuspended();
  if (is_counted) {
    swapper_->mark_operator(false);
    lasting_.pass(number);
  }
  each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t slot) {
    finder_.pass(tensor.storage().unsafeGetStorageImpl(), moment, collective);
    if (is_counted) {
      lasting_.read(slot, tensor.storage());
    }
  });
  if (is_counted && is_away(function)) {
    take_until(finder_.now() + 1, true);
  }
  use(function);
}

void SwapStep::done() {
  for (auto& [target, storage] : std::exchange(leaving_, {})) {
    repeated_.learn_end_of_last_use(target);
    swapper_->offload(storage, target);
  }
}

// -- tensors of operators ---------------------------------------------------------------------------------------------

// Offloads the targets that leave as the step begins; called before the first operator of the program.
void SwapStep::leave_at_the_beginning() {
  if (std::exchange(has_begun_, true)) {
    return;
  }
  for (size_t i = 0; i < plan_.targets.size() && plan_.targets[i].last_use < 0; ++i) {
    const std::optional<c10::Storage> storage = lasting_.find(plan_.targets[i].key);
    if (storage && static_cast<int64_t>(storage->nbytes()) == plan_.targets[i].nbytes &&
        swapper_->offload(*storage, static_cast<int64_t>(i))) {
      finder_.note_found(static_cast<int32_t>(i));
    }
  }
}

void SwapStep::take_until(int32_t place, bool outside) {
  for (; next_turn_ < turns_.size() && turns_[next_turn_].place <= place; ++next_turn_) {
    repeated_.learn_turn(static_cast<int32_t>(next_turn_));
    if (turns_[next_turn_].kind == Turn::RESTORE) {
      returned_outside_[turns_[next_turn_].target] = outside;
    }
    take(turns_[next_turn_]);
  }
}

bool SwapStep::is_away(const at::RecordFunction& function) const {
  bool found = false;
  each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t) {
    found = found || swapper_->has(tensor.storage().unsafeGetStorageImpl());
  });
  return found;
}

void SwapStep::take(const Turn& turn) {
  switch (turn.kind) {
    case Turn::RESTORE:
      return swapper_->restore(turn.target);
    case Turn::RELEASE:
      return swapper_->release(turn.target);
    case Turn::PREFETCH:
      return swapper_->prefetch(turn.target);
  }
}

void SwapStep::see(const at::Tensor& tensor, const OperatorMoment& moment, bool made) {
  const c10::Storage& storage = tensor.storage();
  if (finder_.see(
          storage.unsafeGetStorageImpl(),
          static_cast<int64_t>(storage.nbytes()),
          static_cast<int32_t>(tensor.scalar_type()),
          moment,
          made)) {
    alive_.push_back(storage.getWeakStorageImpl()); // keeps the storage's address from being reused in this step
  }
}

// Restores those of the operator's tensors that are away; called after all of its tensors have been noted as in use.
void SwapStep::use(const at::RecordFunction& function) {
  // memplug's own copies need no waits here: they run on streams of their own, which wait for the program's streams
  if (is_suspended() ? swapper_->is_empty() : !swapper_->order_use()) {
    return;
  }
  each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t) {
    swapper_->use(tensor.storage().unsafeGetStorageImpl());
  });
}

// Finds the targets that the plan expects this operator to use last, and has them offloaded when the operator ends.
template <typename Values>
void SwapStep::find(const Values& values, int32_t number, bool output) {
  if (!finder_.expects(number, output)) {
    return;
  }
  each_storage(values, [&](const at::Tensor& tensor, int32_t slot) {
    const c10::Storage& storage = tensor.storage();
    const int32_t target =
        finder_.find(storage.unsafeGetStorageImpl(), static_cast<int64_t>(storage.nbytes()), number, output, slot);
    if (target >= 0) {
      repeated_.learn_last_use(target, storage);
      leaving_.emplace_back(target, storage);
    }
  });
}

// Returns whether the operator is a collective. Other streams may use a collective's tensors until the program waits
// for it. The name decides, since asking for the operator's traits may run Python.
bool SwapStep::is_collective(const at::RecordFunction& function, int32_t number) {
  if (number >= static_cast<int32_t>(collectives_.size())) {
    collectives_.resize(number + 1, -1);
  }
  int8_t& known = collectives_[number];
  if (known < 0) {
    const std::string_view name = function.name();
    known = std::any_of(plan_.collectives.begin(), plan_.collectives.end(), [name](const std::string& begin) {
      return name.starts_with(begin);
    });
  }
  return known > 0;
}

} // namespace memplug
