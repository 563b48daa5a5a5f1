#include "serving.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <stdexcept>

#include "clock.h"
#include "requests.h"
#include "sequence.h"

namespace memplug {
namespace {

std::atomic<bool> on{false};
std::atomic<Arena*> arena{nullptr};
Device* device_of_it = nullptr;
bool checks_of_it = false;

} // namespace

Arena& open_arena(Device& device, bool checks) {
  Arena* current = arena.load();
  if (current == nullptr || device_of_it != &device || checks_of_it != checks) {
    if (current != nullptr && current->counters().reserved_bytes > 0) {
      throw std::runtime_error("memory of an arena of another kind is still in use in this process");
    }
    current = new Arena(device, checks); // never destroyed: blocks may be given back after static destruction
    device_of_it = &device;
    checks_of_it = checks;
    arena = current;
  }
  return *current;
}

Arena* the_arena() {
  return arena.load(std::memory_order_acquire);
}

bool serving() {
  return on.load(std::memory_order_relaxed);
}

void serve(bool wanted) {
  on = wanted;
}

void* serve_request(size_t nbytes, Stream stream) {
  Arena& a = *the_arena();
  if (!trains()) {
    a.elsewhere(nbytes);
    return nullptr;
  }
  Place place = here();
  if (place.pass == OTHER) { // told apart by what came before
    place.micro_batch = last_forward();
  }
  const bool between = place.pass == OTHER || place.pass == NO_GRAD;
  return a.request(pack(place), place.layer, nbytes, stream, between);
}

void give_back_served(void* pointer) {
  if (Arena* a = the_arena()) {
    a->give_back(pointer);
  }
}

int64_t unrecorded_bytes() {
  const Arena* a = the_arena();
  return a != nullptr ? a->counters().unwanted_bytes : 0;
}

void lock_arena_for_fork() {
  if (Arena* a = the_arena()) {
    a->lock();
  }
}

void unlock_arena_after_fork() {
  if (Arena* a = the_arena()) {
    a->unlock();
  }
}

bool RecordingDevice::handed_out(void* pointer, size_t nbytes, Stream stream) {
  profile(pointer, static_cast<int64_t>(nbytes));
  if (!recording_requests()) {
    return false;
  }
  note_malloc(pointer, nbytes, stream);
  return true;
}

// A block that was handed out before the recording is noted with its size, as the native allocators do it.
void RecordingDevice::came_back(void* pointer, size_t nbytes, bool wanted) {
  profile(pointer, -static_cast<int64_t>(nbytes));
  if (wanted || recording_requests()) {
    note_free(pointer, nbytes);
  }
}

void RecordingDevice::profile(void* pointer, int64_t change) {
  in_use_bytes_ += change;
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(pointer, change, in_use_bytes_, 0, device_);
  }
}

} // namespace memplug
