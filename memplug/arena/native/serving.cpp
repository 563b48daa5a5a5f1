#include "serving.h"

#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "clock.h"
#include "requests.h"
#include "sequence.h"

namespace memplug {
namespace {

std::atomic<int32_t> withheld{0}; // bit n is set: pass n is withheld
std::atomic<Arena*> arena{nullptr};

// All arenas of the process; the one that was opened last serves. Never destroyed: blocks may be freed after static
// destruction.
struct Arenas {
  std::mutex mutex;
  std::map<std::pair<ArenaDevice*, bool>, Arena*> all;
};

Arenas& arenas() {
  static auto* instance = new Arenas();
  return *instance;
}

int64_t sum_of(int64_t ArenaCounters::*figure) {
  auto& known = arenas();
  const std::lock_guard<std::mutex> lock(known.mutex);
  int64_t sum = 0;
  for (const auto& [key, each] : known.all) {
    sum += each->counters().*figure;
  }
  return sum;
}

void* serve_by(Arena& a, size_t nbytes, Stream stream) {
  if (!trains()) {
    a.elsewhere(nbytes);
    return nullptr;
  }
  Place place = here();
  if (withheld.load(std::memory_order_relaxed) >> place.pass & 1) {
    a.elsewhere(nbytes);
    return nullptr;
  }
  if (place.pass == OTHER) { // requests between passes get the micro-batch of the forward before them
    place.micro_batch = last_forward();
  }
  const bool between = place.pass == OTHER || place.pass == NO_GRAD;
  const bool gradients = place.pass == OTHER && c10::GradMode::is_enabled();
  const Reuse reuse = !between ? Reuse::NOTHING : gradients ? Reuse::BETWEEN : Reuse::WITHOUT_GRADIENTS;
  return a.request(pack(place), place.layer, nbytes, stream, reuse);
}

// Serves the requests of the devices' allocators from the process's arena.
class ArenaServer final : public Server {
 public:
  void* serve(size_t nbytes, Stream stream) override {
    return serve_by(*the_arena(), nbytes, stream);
  }
  bool give_back(void* block) override {
    Arena* const current = the_arena();
    if (current == nullptr || current->give_back(block)) {
      return current != nullptr;
    }
    Arena* const other = arena_of(block);
    return other != nullptr && other->give_back(block);
  }
  bool use_on(void* block, Stream stream) override {
    Arena* const owner = arena_of(block);
    return owner != nullptr && owner->use_on(block, stream);
  }
  char* reserved_with(const void* block) override {
    const Arena* const owner = arena_of(block);
    return owner != nullptr ? owner->reserved_with(block) : nullptr;
  }
  int64_t told_bytes() override {
    return sum_of(&ArenaCounters::told_bytes);
  }
  int64_t wanted_bytes() override {
    return sum_of(&ArenaCounters::wanted_bytes);
  }
  void forget_wanted() override {
    auto& known = arenas();
    const std::lock_guard<std::mutex> lock(known.mutex);
    for (const auto& [key, each] : known.all) {
      each->forget_wanted();
    }
  }
  std::optional<Bytes> bytes() override {
    if (the_arena() == nullptr) {
      return std::nullopt;
    }
    const ArenaCounters c = the_arena()->counters();
    return Bytes{c.reserved_bytes, c.live_bytes, c.live_size};
  }
};

} // namespace

Arena& open_arena(ArenaDevice& device, bool checks) {
  auto& known = arenas();
  const std::lock_guard<std::mutex> lock(known.mutex);
  Arena*& found = known.all[{&device, checks}];
  if (found == nullptr) {
    found = new Arena(device, checks);
  }
  arena = found;
  return *found;
}

Server& arena_server() {
  static auto* const instance = new ArenaServer();
  return *instance;
}

Arena* the_arena() {
  return arena.load(std::memory_order_acquire);
}

Arena* arena_of(const void* pointer) {
  Arena* const current = the_arena();
  if (current == nullptr || current->owns(pointer)) {
    return current;
  }
  auto& known = arenas();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const auto& [key, other] : known.all) {
    if (other->owns(pointer)) {
      return other;
    }
  }
  return nullptr;
}

void withhold(int32_t passes) {
  withheld = passes;
}

int64_t reserved_bytes() {
  return sum_of(&ArenaCounters::reserved_bytes);
}

int64_t live_bytes() {
  return sum_of(&ArenaCounters::live_bytes);
}

void lock_arenas_for_fork() {
  arenas().mutex.lock();
  for (const auto& [key, each] : arenas().all) {
    each->lock();
  }
}

void unlock_arenas_after_fork() {
  for (const auto& [key, each] : arenas().all) {
    each->unlock();
  }
  arenas().mutex.unlock();
}

bool RecordingDevice::handed_out(void* pointer, size_t nbytes, Stream stream) {
  profile(pointer, static_cast<int64_t>(nbytes));
  return note_malloc(pointer, nbytes, stream);
}

// Tells a recording that a block of this size was freed, as torch's allocators do. A block may have been handed out
// before the recording began. Then the recording is told only if a plan is in force, or if it counts all memory of the
// device.
void RecordingDevice::came_back(void* pointer, size_t nbytes, bool wanted, bool open) {
  profile(pointer, -static_cast<int64_t>(nbytes));
  const bool known = open || base_of_recording() == Base::DEVICE;
  if (wanted || (known && recording_requests())) {
    note_free(pointer, nbytes);
  }
}

void RecordingDevice::profile(void* pointer, int64_t change) {
  const int64_t in_use = in_use_bytes_ += change;
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(pointer, change, in_use, 0, device_);
  }
}

char* NativeBlockDevice::hold(char* begin, c10::DataPtr block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.emplace(begin, std::move(block));
  return begin;
}

void NativeBlockDevice::release(char* begin) {
  c10::DataPtr block; // declared before the lock, so that it is freed after unlocking
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(begin);
  block = std::move(found->second);
  blocks_.erase(found);
}

} // namespace memplug
