#include "swap_list.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "clock.h"
#include "operators.h"
#include "sequence.h"

namespace memplug {
namespace {

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
      : plan_(std::move(plan)), swapper_(std::move(swapper)), device_(device), finder_(plan_) {
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
    finder_.begin();
    alive_.clear();
    leaving_.clear();
    next_turn_ = 0;
    is_running_ = true;
  }

  bool end() {
    if (is_running_) {
      counters.found += finder_.found();
      counters.missed += static_cast<int64_t>(plan_.targets.size()) - finder_.found();
      ++counters.steps;
    }
    is_running_ = false;
    alive_.clear();
    leaving_.clear();
    return swapper_->restore_all();
  }

  bool is_running() const {
    return is_running_;
  }

  // An outermost operator begins.
  void tick(const at::RecordFunction& function, int32_t number) {
    stream_ = swapper_->current_stream();
    finder_.tick(number);
    each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t slot) {
      if (finder_.anchor(tensor.storage().unsafeGetStorageImpl(), slot, number)) {
        anchors_.push_back(tensor.storage().getWeakStorageImpl()); // its address is no other's
      }
    });
    const int32_t place = finder_.now();
    for (; next_turn_ < turns_.size() && turns_[next_turn_].place <= place; ++next_turn_) {
      take(turns_[next_turn_]);
    }
  }

  // Any operator begins.
  void read(const at::RecordFunction& function, int32_t number) {
    each_storage(function.inputs(), [&](const at::Tensor& tensor, int32_t) {
      see(tensor);
      const auto* const storage = tensor.storage().unsafeGetStorageImpl();
      if (finder_.read(storage, number)) {
        swapper_->use(storage);
      }
    });
    find(function.inputs(), number, false);
  }

  void wrote(const at::RecordFunction& function, int32_t number) {
    each_storage(function.outputs(), [&](const at::Tensor& tensor, int32_t) { see(tensor); });
    find(function.outputs(), number, true);
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

  void see(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    if (finder_.see(
            storage.unsafeGetStorageImpl(),
            static_cast<int64_t>(storage.nbytes()),
            static_cast<int32_t>(tensor.scalar_type()),
            stream_)) {
      alive_.push_back(storage.getWeakStorageImpl()); // its address is no other's in this step
    }
  }

  // Of an operator's tensors, those that it is the last to use.
  template <typename Values>
  void find(const Values& values, int32_t number, bool output) {
    each_storage(values, [&](const at::Tensor& tensor, int32_t slot) {
      const c10::Storage& storage = tensor.storage();
      const int32_t target = finder_.find(
          storage.unsafeGetStorageImpl(), static_cast<int64_t>(storage.nbytes()), number, output, slot);
      if (target >= 0) {
        leaving_.emplace_back(target, storage);
      }
    });
  }

  const SwapListPlan plan_;
  const std::shared_ptr<StorageSwapper> swapper_;
  const c10::DeviceType device_;
  Finder finder_;
  std::vector<Turn> turns_;
  size_t next_turn_ = 0;
  int64_t stream_ = 0; // that the outermost operator runs on
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_, anchors_;
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
      step->tick(function, number);
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

void unlock_swap_list_after_fork(bool in_child) {
  StorageSwapper::unlock_after_fork(in_child);
  unlock(in_force().mutex, in_child);
}

} // namespace memplug
