#include "swap_list.h"

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "clock.h"
#include "operators.h"
#include "program_clock.h"
#include "sequence.h"

namespace memplug {
namespace {

struct Seen {
  Features features;
  int32_t dtype;
};

// What happens to a target at a place.
struct Turn {
  enum Kind : uint8_t { RESTORE, RELEASE, PREFETCH }; // in the order in which they happen
  int32_t place;
  Kind kind;
  int32_t target;
};

// What the operators of one step do to the tensors of a list. Not of several threads at once.
class SwapStep {
 public:
  SwapStep(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, c10::DeviceType device)
      : plan_(std::move(plan)), swapper_(std::move(swapper)), device_(device), found_(plan_.targets.size()) {
    clock_.load(plan_.program);
    for (size_t i = 0; i < plan_.targets.size(); ++i) {
      const SwapTarget& target = plan_.targets[i];
      const auto index = static_cast<int32_t>(i);
      turns_.push_back({target.release, Turn::RELEASE, index});
      turns_.push_back({target.prefetch, Turn::PREFETCH, index});
      turns_.push_back({target.next_use, Turn::RESTORE, index});
    }
    std::stable_sort(turns_.begin(), turns_.end(), [](const Turn& one, const Turn& other) {
      return std::pair(one.place, one.kind) < std::pair(other.place, other.kind);
    });
  }

  void begin() {
    clock_.begin();
    seen_.clear();
    alive_.clear();
    leaving_.clear();
    std::fill(found_.begin(), found_.end(), false);
    next_target_ = next_turn_ = 0;
    is_running_ = true;
  }

  bool end() {
    if (is_running_) {
      const auto found = std::count(found_.begin(), found_.end(), true);
      counters.found += found;
      counters.missed += static_cast<int64_t>(found_.size()) - found;
      ++counters.steps;
    }
    is_running_ = false;
    seen_.clear();
    alive_.clear();
    leaving_.clear();
    return swapper_->restore_all();
  }

  bool is_running() const {
    return is_running_;
  }

  // An outermost operator begins.
  void tick(int32_t number) {
    const int32_t place = clock_.tick(number);
    for (; next_turn_ < turns_.size() && turns_[next_turn_].place <= place; ++next_turn_) {
      take(turns_[next_turn_]);
    }
  }

  // Any operator begins.
  void read(const at::RecordFunction& function, int32_t number) {
    const uint8_t rank = number < static_cast<int32_t>(plan_.ranks.size()) ? plan_.ranks[number] : 255;
    for (const c10::IValue& value : function.inputs()) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (Seen* const seen = see(tensor)) {
          seen->features.read_by(rank);
          swapper_->use(tensor.storage().unsafeGetStorageImpl());
        }
      });
    }
    match(function.inputs(), number, false);
  }

  void wrote(const at::RecordFunction& function, int32_t number) {
    for (const c10::IValue& value : function.outputs()) {
      each_tensor(value, [&](const at::Tensor& tensor) { see(tensor); });
    }
    match(function.outputs(), number, true);
  }

  // An outermost operator has ended: what it was the last to use leaves.
  void done() {
    for (auto& [target, storage] : std::exchange(leaving_, {})) {
      swapper_->offload(storage, target);
    }
  }

  SwapListCounters counters;

 private:
  void take(const Turn& turn) {
    switch (turn.kind) {
      case Turn::RESTORE:
        return swapper_->restore(turn.target);
      case Turn::RELEASE:
        return swapper_->release(turn.target);
      case Turn::PREFETCH:
        return swapper_->prefetch(turn.target);
    }
  }

  // Null: it is none that a list could name.
  Seen* see(const at::Tensor& tensor) {
    if (!tensor.has_storage() || tensor.device().type() != device_) {
      return nullptr;
    }
    const c10::Storage& storage = tensor.storage();
    if (static_cast<int64_t>(storage.nbytes()) < plan_.min_bytes) {
      return nullptr;
    }
    const auto [found, fresh] = seen_.emplace(storage.unsafeGetStorageImpl(), Seen{});
    if (fresh) {
      found->second.dtype = static_cast<int32_t>(tensor.scalar_type());
      alive_.push_back(storage.getWeakStorageImpl()); // its address is no other's in this step
    }
    return &found->second;
  }

  // Whether an operator's tensors are targets that it is the last to use.
  template <typename Values>
  void match(const Values& values, int32_t number, bool output) {
    const int32_t place = clock_.now();
    const auto& targets = plan_.targets;
    while (next_target_ < targets.size() && targets[next_target_].last_use < place - ProgramClock::kReach) {
      ++next_target_;
    }
    for (size_t i = next_target_; i < targets.size() && targets[i].last_use <= place + ProgramClock::kReach; ++i) {
      const SwapTarget& target = targets[i];
      if (found_[i] || target.operator_number != number || (target.output != 0) != output ||
          std::abs(target.last_use - place) > target.tolerance || place >= target.next_use) {
        continue;
      }
      int32_t slot = 0;
      for (const c10::IValue& value : values) {
        each_tensor(value, [&](const at::Tensor& tensor) {
          const bool counts = tensor.has_storage() && tensor.device().type() == device_;
          if (counts && slot++ == target.slot && !found_[i] && is(target, tensor)) {
            found_[i] = true;
            leaving_.emplace_back(static_cast<int32_t>(i), tensor.storage());
          }
        });
      }
    }
  }

  bool is(const SwapTarget& target, const at::Tensor& tensor) const {
    if (static_cast<int64_t>(tensor.storage().nbytes()) != target.nbytes) {
      return false;
    }
    const auto* const storage = tensor.storage().unsafeGetStorageImpl();
    const auto seen = seen_.find(storage);
    return seen != seen_.end() && seen->second.dtype == target.dtype &&
        seen->second.features == Features{target.uses, target.kinds, target.recent} &&
        std::none_of(leaving_.begin(), leaving_.end(), [&](const auto& each) {
             return each.second.unsafeGetStorageImpl() == storage;
           });
  }

  const SwapListPlan plan_;
  const std::shared_ptr<StorageSwapper> swapper_;
  const c10::DeviceType device_;
  ProgramClock clock_;
  std::vector<Turn> turns_;
  std::vector<bool> found_;
  size_t next_target_ = 0, next_turn_ = 0;
  ska::flat_hash_map<const c10::StorageImpl*, Seen> seen_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;
  std::vector<std::pair<int32_t, c10::Storage>> leaving_; // when the operator that runs is done
  bool is_running_ = false;
};

// The list in force. Everything under the mutex but `enclosing`.
struct InForce {
  std::recursive_mutex mutex; // a copy's operators are seen too
  std::unique_ptr<SwapStep> step;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};

InForce& in_force() {
  static auto* instance = new InForce(); // never destroyed: autograd's threads outlive static destruction
  return *instance;
}

std::atomic<bool> silent{false};
thread_local int32_t enclosing = 0; // operators that the calling thread is inside of

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  const int32_t number = number_of(function);
  if (number == NOT_AN_OPERATOR) {
    return nullptr;
  }
  const int32_t outside = enclosing++;
  if (silent || !in_program()) {
    return nullptr;
  }
  const std::lock_guard<std::recursive_mutex> lock(in_force().mutex);
  SwapStep* const step = in_force().step.get();
  if (step != nullptr && step->is_running()) {
    if (outside == 0) {
      step->tick(number);
    }
    step->read(function, number);
  }
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  const int32_t number = number_of(function);
  if (number == NOT_AN_OPERATOR) {
    return;
  }
  --enclosing;
  if (silent || !in_program()) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(in_force().mutex);
  SwapStep* const step = in_force().step.get();
  if (step != nullptr && step->is_running()) {
    step->wrote(function, number);
    if (enclosing == 0) {
      step->done();
    }
  }
}

void remove_callback(InForce& now) {
  if (now.handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(now.handle);
    now.handle = at::INVALID_CALLBACK_HANDLE;
  }
}

} // namespace

void load_swap_list(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, int32_t device_type) {
  InForce& now = in_force();
  const std::lock_guard<std::recursive_mutex> lock(now.mutex);
  silent = false;
  now.step = std::make_unique<SwapStep>(std::move(plan), std::move(swapper), static_cast<c10::DeviceType>(device_type));
}

void unload_swap_list() {
  InForce& now = in_force();
  const std::lock_guard<std::recursive_mutex> lock(now.mutex);
  remove_callback(now);
  now.step.reset();
}

void begin_swap_step() {
  InForce& now = in_force();
  const std::lock_guard<std::recursive_mutex> lock(now.mutex);
  if (now.step == nullptr) {
    return;
  }
  now.step->begin();
  if (now.handle == at::INVALID_CALLBACK_HANDLE) {
    now.handle = at::addGlobalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
  }
}

bool end_swap_step() {
  InForce& now = in_force();
  const std::lock_guard<std::recursive_mutex> lock(now.mutex);
  remove_callback(now);
  return now.step == nullptr || now.step->end();
}

SwapListCounters swap_list_counters() {
  InForce& now = in_force();
  const std::lock_guard<std::recursive_mutex> lock(now.mutex);
  return now.step == nullptr ? SwapListCounters{} : now.step->counters;
}

void silence_swap_list() {
  silent = true;
}

void lock_swap_list_for_fork() {
  in_force().mutex.lock();
  StorageSwapper::lock_for_fork();
}

void unlock_swap_list_after_fork() {
  StorageSwapper::unlock_after_fork();
  in_force().mutex.unlock();
}

} // namespace memplug
