#include "sequence.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "bus.h"
#include "requests.h"
#include "tensors.h"

namespace memplug {
namespace {

constexpr int64_t CAPACITY = 1 << 22; // operators of one step, at most; memory pages beyond a step's end stay untouched

// The sequence of one step, written without locks.
struct Sequence {
  std::unique_ptr<int32_t[]> numbers{new int32_t[CAPACITY]}; // not initialised
  std::atomic<int64_t> count{0};
};

Sequence& sequence() {
  static auto* instance = new Sequence();
  return *instance;
}

// The current recording; the mutex guards everything in it.
struct OpenRecording {
  std::mutex mutex;
  int64_t number = 0; // number of this recording in the process
  bool open = false; // if false, callbacks record nothing: one may still run after it was removed
  Records records;
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::chrono::steady_clock::time_point begin;
  ska::flat_hash_map<const c10::StorageImpl*, int32_t> number_of;
  // weak references: the address of a dead `StorageImpl` is not reused, though the tensor's memory is freed
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen;
};

OpenRecording& recording() {
  static auto* instance = new OpenRecording();
  return *instance;
}

// A running operator, which may end after the recording.
struct RunningOperator {
  int64_t recording; // number of the recording; -1: the operator's tensors are not recorded
  int64_t index;
};

thread_local std::vector<RunningOperator> entered; // while recording: the operators that this thread is inside of
std::atomic<int64_t> running{-1};
std::atomic<int32_t> detail{SEQUENCE};
bool claimed = false; // guarded by Python's lock

void use(OpenRecording& r, int64_t index, const at::Tensor& tensor, bool output) {
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
    r.records.tensors[number].nbytes = nbytes; // the storage has grown
  }
  r.records.uses.push_back({static_cast<int32_t>(index), number, output});
}

void use(OpenRecording& r, int64_t index, const c10::IValue& value, bool output) {
  each_tensor_or_number(value, [&](const at::Tensor& tensor) { use(r, index, tensor, output); });
}

void add_to_sequence(int32_t number) {
  auto& s = sequence();
  const int64_t index = s.count.fetch_add(1, std::memory_order_relaxed);
  if (index < CAPACITY) {
    s.numbers[index] = number;
  }
}

bool on_operator(OperatorCall& call) {
  if (in_model() && call.number() != NOT_AN_OPERATOR) {
    add_to_sequence(call.number());
  }
  return false;
}

int64_t add_operator(OpenRecording& r, int32_t number) {
  const Place place = here();
  const auto elapsed = std::chrono::steady_clock::now() - r.begin;
  r.records.operators.push_back(
      {number,
       pack(place),
       place.layer,
       std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
       in_use_bytes(),
       static_cast<int16_t>(in_program() ? static_cast<int>(entered.size()) - 1 : trains_unsuspended() ? -1 : -2)});
  const auto index = static_cast<int64_t>(r.records.operators.size()) - 1;
  running = index;
  return index;
}

// Records the beginning of an operator, and its inputs at detail TENSORS.
void begin_recorded(OperatorCall& call) {
  if (!trains()) {
    return;
  }
  if (in_model()) {
    add_to_sequence(call.number());
  }
  auto& r = recording();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (!r.open) {
    return;
  }
  const int64_t index = add_operator(r, call.number());
  if (detail.load(std::memory_order_relaxed) != TENSORS) {
    return;
  }
  for (const c10::IValue& value : call.function.inputs()) {
    use(r, index, value, false);
  }
  entered.back() = {r.number, index};
}

bool on_recorded_operator(OperatorCall& call) {
  if (call.number() == NOT_AN_OPERATOR) {
    return false;
  }
  entered.push_back({-1, -1});
  begin_recorded(call);
  return true;
}

void on_recorded_end(OperatorCall& call) {
  const RunningOperator ended = entered.back();
  entered.pop_back();
  if (ended.recording < 0) {
    return;
  }
  auto& r = recording();
  const std::lock_guard<std::mutex> lock(r.mutex);
  if (ended.recording != r.number) {
    return;
  }
  for (const c10::IValue& value : call.function.outputs()) {
    use(r, ended.index, value, true);
  }
}

constexpr Watcher of_detail[] = {
    {Need::BEGINNINGS, on_operator},
    {Need::ENDS, on_recorded_operator, on_recorded_end},
    {Need::TENSORS, on_recorded_operator, on_recorded_end},
};

void watch_in(Detail level) {
  detail = level;
  set_watcher(RECORDS, &of_detail[level]);
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
  return records; // `seen` is destroyed after the lock is released
}

} // namespace

void claim() {
  if (claimed) {
    throw std::runtime_error("the recorder of this process is taken");
  }
  claimed = true;
  sequence().count = 0;
  forget_blocks(); // blocks of an earlier recorder
  forget_streams();
  own_thread();
}

void release() {
  end_records();
  claimed = false;
}

void release_in_child() {
  silence(RECORDS);
  sequence().count = 0;
  take_records();
  claimed = false;
}

void watch(bool on) {
  if (on) {
    watch_in(SEQUENCE);
  } else {
    set_watcher(RECORDS, nullptr);
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
  watch_in(level);
}

Records end_records() {
  set_watcher(RECORDS, nullptr);
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
  lock_names_for_fork();
  recording().mutex.lock();
}

void unlock_records_after_fork() {
  recording().mutex.unlock();
  unlock_names_after_fork();
}

} // namespace memplug
