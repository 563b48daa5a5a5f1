#include "sequence.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "operator_names.h"
#include "operators.h"
#include "requests.h"
#include "torch_private.h"

namespace memplug {
namespace {

constexpr int64_t CAPACITY = 1 << 22; // operators of one step; pages that no step reaches are never touched

// The sequence of one step, written without locks.
struct Sequence {
  std::unique_ptr<int32_t[]> numbers{new int32_t[CAPACITY]}; // not initialised
  std::atomic<int64_t> count{0};
};

Sequence& sequence() {
  static auto* instance = new Sequence();
  return *instance;
}

// A recording. Everything under the mutex.
struct Recording {
  std::mutex mutex;
  int64_t number = 0; // of this recording in the process
  bool open = false; // a callback may still run after it was removed
  Records records;
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::chrono::steady_clock::time_point begin;
  ska::flat_hash_map<const c10::StorageImpl*, int32_t> number_of;
  // keep the addresses of storages that died from being used again; their memory is free all the same
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen;
};

Recording& recording() {
  static auto* instance = new Recording();
  return *instance;
}

thread_local int32_t depth = 0; // operators that the calling thread is inside of, while recording
std::atomic<int64_t> running{-1};
std::atomic<int32_t> detail{SEQUENCE};
std::atomic<bool> deaf{false}; // in the child of a fork, until it watches by itself
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE; // this and `claimed`: of the thread that holds Python's lock
bool claimed = false;

void use(Recording& r, int64_t index, const at::Tensor& tensor, bool output) {
  if (!tensor.has_storage() || tensor.device().type() != r.device_type) {
    return;
  }
  const auto& storage = tensor.storage();
  const auto [found, fresh] =
      r.number_of.emplace(storage.unsafeGetStorageImpl(), static_cast<int32_t>(r.records.tensors.size()));
  const int32_t number = found->second;
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  if (fresh) {
    r.seen.emplace_back(storage.getWeakStorageImpl());
    r.records.tensors.push_back({nbytes, static_cast<int32_t>(tensor.scalar_type())});
  } else if (nbytes > r.records.tensors[number].nbytes) {
    r.records.tensors[number].nbytes = nbytes; // it was empty, or grew
  }
  r.records.uses.push_back({static_cast<int32_t>(index), number, output});
}

void use(Recording& r, int64_t index, const c10::IValue& value, bool output) {
  each_tensor_or_number(value, [&](const at::Tensor& tensor) { use(r, index, tensor, output); });
}

// From an operator's beginning to its end, which may come after the recording's.
struct Inside final : at::ObserverContext {
  Inside(int64_t recording, int64_t index) : recording(recording), index(index) {}
  int64_t recording;
  int64_t index;
};

void add_to_sequence(int32_t number) {
  auto& s = sequence();
  const int64_t index = s.count.fetch_add(1, std::memory_order_relaxed);
  if (index < CAPACITY) {
    s.numbers[index] = number;
  }
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (!deaf && in_model()) {
    const int32_t number = number_of(function);
    if (number != NOT_AN_OPERATOR) {
      add_to_sequence(number);
    }
  }
  return nullptr;
}

int64_t add_operator(Recording& r, int32_t number) {
  const Place place = here();
  const auto elapsed = std::chrono::steady_clock::now() - r.begin;
  r.records.operators.push_back(
      {number,
       pack(place),
       place.layer,
       std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
       in_use_bytes(),
       static_cast<int16_t>(in_program() ? depth : trains_unsuspended() ? -1 : -2)});
  const auto index = static_cast<int64_t>(r.records.operators.size()) - 1;
  running = index;
  return index;
}

std::unique_ptr<at::ObserverContext> on_recorded_operator(const at::RecordFunction& function) {
  const int32_t number = number_of(function);
  if (number == NOT_AN_OPERATOR) {
    return nullptr;
  }
  struct Enters {
    ~Enters() {
      ++depth;
    }
  } const enters;
  if (deaf || !trains()) {
    return nullptr;
  }
  if (in_model()) {
    add_to_sequence(number);
  }
  auto& r = recording();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (!r.open) {
    return nullptr;
  }
  const int64_t index = add_operator(r, number);
  if (detail.load(std::memory_order_relaxed) != TENSORS) {
    return nullptr;
  }
  for (const c10::IValue& value : function.inputs()) {
    use(r, index, value, false);
  }
  return std::make_unique<Inside>(r.number, index);
}

void on_recorded_end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (number_of(function) == NOT_AN_OPERATOR) {
    return;
  }
  --depth;
  const auto* inside = static_cast<const Inside*>(context);
  auto& r = recording();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (inside == nullptr || inside->recording != r.number) {
    return;
  }
  for (const c10::IValue& value : function.outputs()) {
    use(r, inside->index, value, true);
  }
}

void remove_callback() {
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

void set_callback(Detail level) {
  remove_callback();
  at::RecordFunctionCallback callback(on_operator);
  if (level >= OPERATORS) {
    callback = at::RecordFunctionCallback(on_recorded_operator, on_recorded_end);
    callback.needsInputs(level >= TENSORS).needsOutputs(level >= TENSORS);
  }
  detail = level;
  handle = at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
  deaf = false;
}

Records take_records() {
  auto& r = recording();
  decltype(r.seen) seen;
  Records records;
  {
    const std::lock_guard<std::mutex> lock(r.mutex);
    ++r.number;
    r.open = false;
    records = std::exchange(r.records, {});
    seen = std::exchange(r.seen, {});
    r.number_of.clear();
    running = -1;
  }
  return records; // `seen` is freed after the lock is released
}

} // namespace

void claim() {
  if (claimed) {
    throw std::runtime_error("the recorder of this process is taken");
  }
  claimed = true;
  sequence().count = 0;
  forget_blocks(); // of an earlier recorder
  own_thread();
}

void release() {
  end_records();
  claimed = false;
}

void release_in_child() {
  deaf = true;
  sequence().count = 0;
  take_records();
  claimed = false;
}

void watch(bool on) {
  if (on) {
    set_callback(SEQUENCE);
  } else {
    remove_callback();
  }
}

std::pair<std::vector<int32_t>, int64_t> take_sequence() {
  auto& s = sequence();
  const int64_t count = s.count.exchange(0);
  const int64_t kept = std::min(count, CAPACITY);
  return {std::vector<int32_t>(s.numbers.get(), s.numbers.get() + kept), count};
}

void begin_records(Detail level, int32_t device_type) {
  end_records();
  {
    auto& r = recording();
    const std::lock_guard<std::mutex> lock(r.mutex);
    r.records.operators.reserve(1 << 15);
    r.device_type = static_cast<c10::DeviceType>(device_type);
    r.begin = std::chrono::steady_clock::now();
    r.open = true;
  }
  set_callback(level);
}

Records end_records() {
  remove_callback();
  return take_records();
}

std::vector<int32_t> recorded_numbers(const std::vector<at::Tensor>& tensors) {
  auto& r = recording();
  const std::lock_guard<std::mutex> lock(r.mutex);
  std::vector<int32_t> numbers;
  for (const at::Tensor& tensor : tensors) {
    const auto* const storage = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    const auto found = r.number_of.find(storage);
    if (found != r.number_of.end() && storage->resizable() && storage->allocator() != nullptr) {
      numbers.push_back(found->second);
    }
  }
  return numbers;
}

int64_t running_operator() {
  return running.load(std::memory_order_relaxed);
}

void lock_records_for_fork() {
  update_callbacks(); // or the child's next operator may ask for torch's lock
  lock_names_for_fork();
  recording().mutex.lock();
}

void unlock_records_after_fork() {
  recording().mutex.unlock();
  unlock_names_after_fork();
}

} // namespace memplug
