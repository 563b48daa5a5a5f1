#include "swap_list.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "bus.h"
#include "clock.h"
#include "cuda_memory.h"
#include "relief.h"
#include "requests.h"
#include "torch_private.h"

namespace memplug {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// The list in force. `swap_mutex` guards it. The mutex is recursive: memplug's own copies, made while it is locked,
// call this file again, by their operators and by requests that fail.
struct InForce {
  std::unique_ptr<SwapStep> step;
  bool watches = false; // whether a step runs
  Sight seen = Sight::NOTHING; // what the observer shows of operators now
};

InForce& in_force() {
  static auto* instance = new InForce(); // never destroyed: autograd's threads outlive static destruction
  return *instance;
}

std::atomic<bool> silent{false};

// State of the calling thread.
thread_local int32_t enclosing = 0; // number of seen operators that the thread is inside of
thread_local OperatorMoment outermost; // its number is 0 if the step has not seen the outermost operator begin
thread_local OperatorMoment unseen; // in a departed step: an unseen operator that the thread may be inside of

// The followed step (repeated_step.h), or null. With this pointer, a request at which no action is due needs no lock.
// The pointer is valid while requests are watched.
std::atomic<RepeatedStep*> followed{nullptr};

// Number of the only operator that the step needs to see; `SwapStep::ANY`: it needs to see all.
std::atomic<int32_t> awaited{SwapStep::ANY};

bool is_awaited(int32_t number) {
  const int32_t only = awaited.load(std::memory_order_acquire);
  return only == SwapStep::ANY || only == number;
}

bool on_number(OperatorCall& call);
bool on_begin(OperatorCall& call);
void on_end(OperatorCall& call);
constexpr Watcher of_numbers{Need::BEGINNINGS, on_number};
constexpr Watcher of_tensors{Need::TENSORS, on_begin, on_end};

void see(InForce& now, Sight needed) {
  if (needed != now.seen) {
    set_watcher(STORAGES, needed == Sight::TENSORS ? &of_tensors : needed == Sight::NUMBERS ? &of_numbers : nullptr);
    now.seen = needed;
  }
}

// Makes the observer show no more than the step needs: boxing tensors is most of a callback's cost.
void see_what_is_needed(InForce& now) {
  followed.store(now.step->followed(), std::memory_order_release);
  const auto [needed, number] = now.step->sight();
  awaited.store(number, std::memory_order_release);
  if (now.watches) {
    see(now, needed);
  }
}

// Memory that served the step's last request. The step learns of it at the next event, which locks the mutex anyway.
std::atomic<const void*> last_served{nullptr};

void tell_of_last_served(SwapStep& step) {
  if (last_served.load(std::memory_order_relaxed) != nullptr) {
    step.served(last_served.exchange(nullptr));
  }
}

// Called before a request for memory is served (`memory` is null), and again once it is served.
void on_request(size_t nbytes, const void* stream, const void* memory) {
  const bool is_of_step = trains_unsuspended();
  if (is_of_step && memory != nullptr) {
    last_served.store(memory, std::memory_order_release);
    return;
  }
  RepeatedStep* const step = followed.load(std::memory_order_acquire);
  if (is_of_step && step != nullptr && step->pass(static_cast<int64_t>(nbytes), stream)) {
    return;
  }
  if (silent || (!is_of_step && memory == nullptr)) {
    return;
  }
  const Lock lock(swap_mutex());
  InForce& now = in_force();
  if (now.step == nullptr || !now.step->is_running()) {
    return;
  }
  tell_of_last_served(*now.step);
  if (is_of_step) {
    now.step->asked(static_cast<int64_t>(nbytes), stream);
    see_what_is_needed(now);
  } else {
    now.step->served_other(memory);
  }
}

// Called as an operator begins, in a followed step that needs only operators' numbers.
bool on_number(OperatorCall& call) {
  const int32_t number = call.number();
  if (number == NOT_AN_OPERATOR || !is_awaited(number) || !in_program()) {
    return false;
  }
  const Lock lock(swap_mutex());
  SwapStep* const step = in_force().step.get();
  if (step != nullptr && step->followed() != nullptr) {
    step->began(number);
    see_what_is_needed(in_force());
  }
  return false;
}

// Returns whether the calling thread is inside of an operator's kernel.
bool is_inside_of_a_kernel() {
  return local_keys().excluded_.has(c10::DispatchKey::AutogradFunctionality);
}

// Notes that an operator begins outside of all seen operators. After the step has departed, the operator may still be
// inside of an unseen one; then its tensors count as in use until the unseen operator ends.
OperatorMoment enter(SwapStep& step) {
  if (!step.has_departed()) {
    return step.enter();
  }
  if (!is_inside_of_a_kernel()) {
    step.leave(std::exchange(unseen, {}));
    return step.enter();
  }
  if (!step.is_in(unseen)) {
    unseen = step.enter();
  }
  return unseen;
}

// Reports to the step that an operator begins.
void tell(const at::RecordFunction& function, int32_t number, bool is_outermost) {
  const Lock lock(swap_mutex());
  SwapStep* const step = in_force().step.get();
  if (step == nullptr || !step->is_running()) {
    return;
  }
  tell_of_last_served(*step);
  if (!step->is_in(outermost)) {
    outermost = enter(*step);
  }
  if (!in_program()) {
    step->pass(function, number, outermost);
    return;
  }
  if (is_outermost) {
    step->tick(function, number, outermost);
  }
  step->read(function, number, outermost, is_outermost);
  see_what_is_needed(in_force());
}

bool on_begin(OperatorCall& call) {
  const int32_t number = call.number();
  if (number == NOT_AN_OPERATOR) {
    return false;
  }
  const bool is_outermost = enclosing++ == 0;
  if (is_outermost) {
    outermost = {};
  }
  if (is_awaited(number)) {
    tell(call.function, number, is_outermost);
  }
  return true;
}

void on_end(OperatorCall& call) {
  struct Leaves { // destroyed last: copies that begin below still run inside of the operator
    ~Leaves() {
      --enclosing;
    }
  } const leaves;
  const bool is_outermost = enclosing == 1;
  const int32_t number = call.number();
  if (silent || (!is_awaited(number) && !(is_outermost && outermost.number > 0))) {
    return;
  }
  const Lock lock(swap_mutex());
  SwapStep* const step = in_force().step.get();
  if (step == nullptr || !step->is_running()) {
    return;
  }
  tell_of_last_served(*step);
  if (in_program()) {
    step->wrote(call.function, number, outermost);
    if (is_outermost) {
      step->done();
    }
  }
  if (is_outermost && outermost.number != unseen.number) {
    step->leave(outermost);
  }
  see_what_is_needed(in_force());
}

// Frees memory for a failed request. Does nothing if memplug does not see the thread's outermost operator: it would not
// know which tensors that operator uses.
bool relieve_step(size_t nbytes, int failures) {
  if (silent || !(enclosing > 0 || at::isRecordFunctionEnabled())) {
    return false;
  }
  const Lock lock(swap_mutex());
  SwapStep* const step = in_force().step.get();
  return step != nullptr && step->relieve(static_cast<int64_t>(nbytes), failures);
}

void stop_watching(InForce& now) {
  watch_requests(nullptr);
  followed = nullptr;
  now.watches = false;
  see(now, Sight::NOTHING);
}

} // namespace

void load_swap_list(SwapListPlan plan, std::shared_ptr<StorageSwapper> swapper, int32_t device_type) {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  silent = false;
  now.step = std::make_unique<SwapStep>(std::move(plan), std::move(swapper), static_cast<c10::DeviceType>(device_type));
}

void unload_swap_list() {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  stop_watching(now);
  now.step.reset();
}

bool drop_swap_list(const std::shared_ptr<StorageSwapper>& swapper) {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  if (now.step == nullptr || !now.step->is_of(swapper)) {
    return false;
  }
  ask_for_relief(nullptr, {});
  stop_watching(now);
  now.step->end();
  now.step.reset();
  return true;
}

void begin_swap_step() {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  if (now.step == nullptr) {
    return;
  }
  last_served = nullptr;
  now.step->begin();
  now.watches = true;
  see_what_is_needed(now);
  watch_requests(now.step->has_targets() ? &on_request : nullptr);
}

bool end_swap_step() {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  stop_watching(now);
  return now.step == nullptr || now.step->end();
}

SwapListCounters swap_list_counters() {
  InForce& now = in_force();
  const Lock lock(swap_mutex());
  return now.step == nullptr ? SwapListCounters{} : now.step->counters;
}

void silence_swap_list() {
  silent = true;
  silence(STORAGES);
  in_force().watches = false;
  in_force().seen = Sight::NOTHING;
  watch_requests(nullptr);
  followed = nullptr;
  end_relief_in_child();
}

void catch_out_of_memory(bool on, c10::Device device, Explanation explain) {
  ask_for_relief(on ? &relieve_step : nullptr, std::move(explain));
  if (device.is_privateuseone()) {
    on ? install_other(RELIEF) : uninstall_other(RELIEF);
  } else if (device.is_cuda()) {
#ifdef MEMPLUG_CUDA_ARENA
    prepare_cuda_allocator(device.index());
    stand_before_cuda(RELIEF, on);
#else
    throw std::runtime_error("the native core was built without CUDA, or this version of torch changed its allocator");
#endif
  }
}

void lock_swap_list_for_fork() {
  swap_mutex().lock();
}

void unlock_swap_list_after_fork(bool in_child) {
  unlock(swap_mutex(), in_child);
}

} // namespace memplug
