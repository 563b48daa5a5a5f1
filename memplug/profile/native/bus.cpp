#include "bus.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

namespace memplug {
namespace {

constexpr size_t NEEDS = 3;

struct Bus {
  std::mutex mutex; // guards everything except the atomics; its holder takes no other lock than torch's
  std::array<std::atomic<const Watcher*>, WATCHERS> watchers{};
  std::array<int, WATCHERS> watching{}; // number of living `Watching` instances that were not silenced
  std::array<int, WATCHERS> silenced{}; // number of calls of `silence`
  std::array<at::CallbackHandle, NEEDS> handles{
      at::INVALID_CALLBACK_HANDLE, at::INVALID_CALLBACK_HANDLE, at::INVALID_CALLBACK_HANDLE};
};

Bus& bus() {
  static auto* instance = new Bus(); // never destroyed: autograd's threads outlive static destruction
  return *instance;
}

// A running operator, and the watchers to notify of its end.
struct Told {
  int32_t number = OperatorCall::UNKNOWN;
  std::array<void (*)(OperatorCall&), WATCHERS> ends{};
};

// State of the calling thread.
thread_local std::array<std::vector<Told>, NEEDS> told;
thread_local int pauses = 0;

// Calls `tell`. Returns `failure` if it is set, else the exception that `tell` threw, else null.
template <typename Tell>
std::exception_ptr caught(std::exception_ptr failure, const Tell& tell) {
  try {
    tell();
  } catch (...) {
    return failure != nullptr ? failure : std::current_exception();
  }
  return failure;
}

void rethrow(const std::exception_ptr& failure) {
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

template <Need NEED>
std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction& function) {
  OperatorCall call(function);
  Told now;
  std::exception_ptr failure;
  for (size_t order = 0; order < WATCHERS; ++order) {
    const Watcher* const watcher = bus().watchers[order].load(std::memory_order_acquire);
    if (watcher == nullptr || watcher->need != NEED) {
      continue;
    }
    now.ends[order] = watcher->end; // set first, so that `end` is called even if `begin` throws
    failure = caught(std::move(failure), [&] {
      if (!watcher->begin(call)) {
        now.ends[order] = nullptr;
      }
    });
  }
  if constexpr (NEED != Need::BEGINNINGS) {
    now.number = call.known_number();
    told[static_cast<size_t>(NEED)].push_back(now);
  }
  rethrow(failure);
  return nullptr;
}

template <Need NEED>
void end_call(const at::RecordFunction& function, at::ObserverContext*) {
  auto& all = told[static_cast<size_t>(NEED)];
  if (all.empty()) {
    return; // the operator began on another thread
  }
  const Told now = all.back();
  all.pop_back();
  OperatorCall call(function, now.number);
  std::exception_ptr failure;
  for (void (*const end)(OperatorCall&) : now.ends) {
    if (end != nullptr) {
      failure = caught(std::move(failure), [&] { end(call); });
    }
  }
  rethrow(failure);
}

at::RecordFunctionCallback callback(Need need) {
  if (need == Need::BEGINNINGS) {
    return at::RecordFunctionCallback(begin_call<Need::BEGINNINGS>);
  }
  if (need == Need::ENDS) {
    return at::RecordFunctionCallback(begin_call<Need::ENDS>, end_call<Need::ENDS>);
  }
  return at::RecordFunctionCallback(begin_call<Need::TENSORS>, end_call<Need::TENSORS>).needsInputs(true).needsOutputs(true);
}

// Sets the watcher; the caller holds the mutex.
void change(Bus& b, Order order, const Watcher* watcher) {
  if (watcher != nullptr && b.handles[static_cast<size_t>(watcher->need)] == at::INVALID_CALLBACK_HANDLE) {
    b.handles[static_cast<size_t>(watcher->need)] =
        at::addGlobalCallback(callback(watcher->need).scopes({at::RecordScope::FUNCTION}));
  }
  b.watchers[order].store(watcher, std::memory_order_release);
  for (size_t need = 0; need < NEEDS; ++need) {
    const bool is_needed = std::any_of(b.watchers.begin(), b.watchers.end(), [&](const auto& each) {
      const Watcher* const known = each.load(std::memory_order_relaxed);
      return known != nullptr && static_cast<size_t>(known->need) == need;
    });
    if (!is_needed && b.handles[need] != at::INVALID_CALLBACK_HANDLE) {
      at::removeCallback(b.handles[need]);
      b.handles[need] = at::INVALID_CALLBACK_HANDLE;
    }
  }
}

} // namespace

void set_watcher(Order order, const Watcher* watcher) {
  Bus& b = bus();
  const std::lock_guard<std::mutex> lock(b.mutex);
  change(b, order, watcher);
}

void silence(Order order) {
  bus().watchers[order] = nullptr;
  bus().watching[order] = 0;
  ++bus().silenced[order];
}

Watching::Watching(Order order, const Watcher& watcher) : order_(order) {
  Bus& b = bus();
  const std::lock_guard<std::mutex> lock(b.mutex);
  silenced_ = b.silenced[order];
  if (++b.watching[order] == 1) {
    change(b, order, &watcher);
  }
}

Watching::~Watching() {
  Bus& b = bus();
  const std::lock_guard<std::mutex> lock(b.mutex);
  if (b.silenced[order_] == silenced_ && --b.watching[order_] == 0) {
    change(b, order_, nullptr);
  }
}

void lock_bus_for_fork() {
  bus().mutex.lock();
  update_callbacks(); // otherwise the child's next operator may ask for torch's lock
}

void unlock_bus_after_fork() {
  bus().mutex.unlock();
}

void Pause::begin() {
  ++pauses;
}

void Pause::end() {
  --pauses;
}

int Pause::depth() {
  return pauses;
}

} // namespace memplug
