#include "requests.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "clock.h"
#include "sequence.h"
#include "server.h"

namespace memplug {
namespace {

constexpr int64_t BEFORE = -1;

struct LiveBlock {
  int64_t request;
  int64_t nbytes;
  int64_t stream;
};

struct Log {
  // threads lock it while they hold the allocator's lock, so its holder must neither allocate on the device nor take
  // Python's lock
  std::mutex mutex;
  std::vector<RequestEvent> events;
  ska::flat_hash_map<void*, LiveBlock> alive;
  std::vector<const void*> streams;
  int64_t requests = 0;
  int64_t tracked_bytes = 0;
  Usage usage{};
};

Log& log() {
  static auto* instance = new Log(); // never destroyed: blocks may be freed after static destruction
  return *instance;
}

std::atomic<bool> is_recording{false};
std::atomic<Base> base{Base::TRACKED};
std::atomic<int64_t> in_use{0}; // copy of the log's `usage.in_use_bytes`, readable without the lock
thread_local bool moving = false;
std::atomic<int64_t> moved_out{0};
std::atomic<RequestWatcher> the_watcher{nullptr};

int64_t stream_number(Log& l, const void* stream) {
  const auto found = std::find(l.streams.begin(), l.streams.end(), stream);
  if (found != l.streams.end()) {
    return found - l.streams.begin();
  }
  l.streams.push_back(stream);
  return static_cast<int64_t>(l.streams.size()) - 1;
}

void add(Log& l, int32_t kind, LiveBlock block, int64_t nbytes) {
  const Place place = here();
  l.events.push_back(
      {kind, block.request, nbytes, block.stream, running_operator(), pack(place), place.layer, thread_number()});
  l.usage.in_use_bytes += kind == 0 ? block.nbytes : -block.nbytes;
  l.usage.peak_bytes = std::max(l.usage.peak_bytes, l.usage.in_use_bytes);
  l.usage.marked_peak_bytes = std::max(l.usage.marked_peak_bytes, l.usage.in_use_bytes);
  in_use.store(l.usage.in_use_bytes, std::memory_order_relaxed);
}

} // namespace

void begin_requests(int64_t base_bytes) {
  // ask the server and the limit before taking the lock: they report their blocks while holding locks of their own
  base = base_bytes >= 0 ? Base::DEVICE : is_cpu_limited() ? Base::LIMIT : Base::TRACKED;
  const int64_t told = server().told_bytes(), wanted = server().wanted_bytes(), counted = cpu_bytes().in_use;
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  for (auto& [pointer, block] : l.alive) {
    block.request = BEFORE;
  }
  l.events.clear();
  l.events.reserve(1 << 16);
  l.requests = 0;
  if (base == Base::DEVICE) {
    base_bytes += moved_out;
  } else if (base == Base::LIMIT) {
    base_bytes = counted + told + moved_out;
  } else {
    base_bytes = l.tracked_bytes + told - wanted; // `tracked_bytes` and `told` both include the wanted bytes
  }
  l.usage = {base_bytes, base_bytes, base_bytes, base_bytes};
  in_use = base_bytes;
  is_recording = true;
}

void end_requests() {
  is_recording = false;
}

Base base_of_recording() {
  return base.load(std::memory_order_relaxed);
}

bool recording_requests() {
  return is_recording.load(std::memory_order_relaxed);
}

Moving::Moving(bool on) : before_(std::exchange(moving, on)) {}

Moving::~Moving() {
  moving = before_;
}

void note_moved(void* from, void* to) {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  const auto found = l.alive.find(from);
  if (found != l.alive.end()) {
    const LiveBlock block = found->second;
    l.alive.erase(found);
    l.alive[to] = block;
  }
}

void note_moved_out(int64_t nbytes) {
  moved_out += nbytes;
}

bool note_malloc(void* pointer, size_t nbytes, const void* stream) {
  if (moving) {
    return true; // `note_moved` reports the move
  }
  if (!recording_requests()) {
    return false;
  }
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  if (!recording_requests()) {
    return false;
  }
  const LiveBlock block{l.requests++, static_cast<int64_t>(nbytes), stream_number(l, stream)};
  l.alive[pointer] = block;
  l.tracked_bytes += block.nbytes;
  add(l, 0, block, block.nbytes);
  return true;
}

void note_free(void* pointer, size_t nbytes) {
  if (moving) {
    return;
  }
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  LiveBlock block{BEFORE, static_cast<int64_t>(nbytes), 0};
  const auto found = l.alive.find(pointer);
  const bool known = found != l.alive.end();
  if (known) {
    block = found->second;
    l.alive.erase(found);
    l.tracked_bytes -= block.nbytes;
  }
  if (recording_requests() && (known || nbytes > 0)) {
    add(l, 1, block, block.request == BEFORE ? block.nbytes : 0);
  }
}

void watch_requests(RequestWatcher watcher) {
  the_watcher = watcher;
}

RequestWatcher request_watcher() {
  return the_watcher.load(std::memory_order_relaxed);
}

void forget_blocks() {
  server().forget_wanted();
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  l.alive.clear();
  l.tracked_bytes = 0;
}

void forget_streams() {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  l.streams.clear();
}

int64_t tracked_bytes() {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  return l.tracked_bytes;
}

Usage usage() {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  return l.usage;
}

void mark_peak() {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  l.usage.marked_peak_bytes = l.usage.in_use_bytes;
}

int64_t in_use_bytes() {
  return in_use.load(std::memory_order_relaxed);
}

std::vector<RequestEvent> take_requests() {
  auto& l = log();
  const std::lock_guard<std::mutex> lock(l.mutex);
  return std::exchange(l.events, {});
}

void lock_requests_for_fork() {
  log().mutex.lock();
}

void unlock_requests_after_fork() {
  log().mutex.unlock();
}

} // namespace memplug
