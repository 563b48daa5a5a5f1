// Where memory is short: what a swapper does for no plan (Chameleon, section 6.3).
#include <algorithm>

#include "absent.h"

namespace memplug {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

constexpr int64_t kHostSlab = 64 << 20; // bytes
constexpr int64_t kPassive = -1; // in place of a key

} // namespace

bool StorageSwapper::add_host_memory(int64_t nbytes) {
  const int64_t room = passive_room_ / kRowAlignment * kRowAlignment;
  if (nbytes > room) {
    return false;
  }
  const int64_t size = std::min(room, std::max(nbytes, kHostSlab));
  const Own own;
  try {
    pool_.add(streams_->host_memory(size));
  } catch (const std::exception&) { // the system has less
    passive_room_ = 0;
    return false;
  }
  passive_room_ -= size;
  return true;
}

#ifdef MEMPLUG_SWAPS_STORAGES

int64_t StorageSwapper::release_leaving() {
  const Lock lock(swap_mutex());
  const int64_t before = counters_.released_bytes;
  std::vector<Absent*> leaving;
  for (const auto& absent : all_) {
    if (absent->state == State::LEAVING && is_current(*absent) && !streams_->is_capturing()) {
      leaving.push_back(absent.get());
    }
  }
  for (Absent* const absent : leaving) {
    leave(*absent);
  }
  return counters_.released_bytes - before;
}

int64_t StorageSwapper::leave_now(const c10::Storage& storage) {
  const Lock lock(swap_mutex());
  Absent* const absent = start_leaving(storage, kPassive);
  if (absent == nullptr) {
    return 0;
  }
  absent->passive = true;
  const int64_t nbytes = absent->nbytes;
  ++counters_.passive;
  counters_.passive_bytes += nbytes;
  leave(*absent);
  return nbytes;
}

int64_t StorageSwapper::turn_back() {
  const Lock lock(swap_mutex());
  Absent* last = nullptr;
  for (const auto& absent : all_) {
    if (absent->state == State::RETURNING && is_current(*absent) && (last == nullptr || absent->began > last->began)) {
      last = absent.get();
    }
  }
  if (last == nullptr || streams_->is_capturing()) {
    return 0;
  }
  streams_->wait(last->stream, last->prefetched, Wait::DISCARD_FOR_PREFETCH);
  last->prefetched = nullptr;
  last->state = State::AWAY;
  if (last->passive) {
    note_moved_out(last->nbytes);
  }
  const Moving moving(last->passive);
  last->arriving.clear();
  return last->nbytes;
}

#else

int64_t StorageSwapper::release_leaving() {
  return 0;
}
int64_t StorageSwapper::leave_now(const c10::Storage&) {
  return 0;
}
int64_t StorageSwapper::turn_back() {
  return 0;
}

#endif

} // namespace memplug
