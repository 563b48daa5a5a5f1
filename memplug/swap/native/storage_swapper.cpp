#include "storage_swapper.h"

#include <algorithm>
#include <utility>

#include "absent.h"

namespace memplug {

using Lock = std::lock_guard<std::recursive_mutex>;

std::recursive_mutex& swap_mutex() {
  static auto* instance = new std::recursive_mutex(); // never destroyed: storages outlive static destruction
  return *instance;
}

ska::flat_hash_map<const c10::StorageImpl*, StorageSwapper::Absent*>& StorageSwapper::absents() {
  static auto* instance = new ska::flat_hash_map<const c10::StorageImpl*, Absent*>();
  return *instance;
}

StorageSwapper::StorageSwapper(std::shared_ptr<Streams> streams, at::Tensor slab, int64_t passive_bytes)
    : streams_(std::move(streams)),
      pool_([this](int64_t nbytes) { return add_host_memory(nbytes); }),
      offload_stream_(streams_->make()),
      prefetch_stream_(streams_->make()),
      passive_room_(passive_bytes) {
  if (slab.defined()) {
    pool_.add(std::move(slab));
  }
}

StorageSwapper::~StorageSwapper() {
  const Lock lock(swap_mutex());
  drain();
  for (const auto& absent : all_) { // where the device has no room: on the host, for good
    absents().erase(absent->storage);
    if (absent->passive && absent->state == State::AWAY) {
      note_moved_out(-absent->nbytes);
    }
    if (absent->host != nullptr) {
      absent->host->absent = nullptr;
    }
  }
}

int64_t StorageSwapper::host_bytes() {
  const Lock lock(swap_mutex());
  return pool_.used_bytes;
}

SwapCounters StorageSwapper::counters() {
  const Lock lock(swap_mutex());
  return counters_;
}

StorageSwapper::Absent* StorageSwapper::find(int64_t key) const {
  const auto found = of_key_.find(key);
  return found == of_key_.end() ? nullptr : found->second;
}

bool StorageSwapper::has(const c10::StorageImpl* storage) const {
  return absents().find(storage) != absents().end();
}

bool StorageSwapper::is_current(const Absent& absent) {
  return streams_->same(streams_->current(), absent.stream);
}

void StorageSwapper::measure(bool waits, bool operators) {
  const Lock lock(swap_mutex());
  times_.measure(waits, operators);
}

std::optional<double> StorageSwapper::waited_s() {
  const Lock lock(swap_mutex());
  return times_.waited_s(*streams_);
}

std::optional<std::vector<double>> StorageSwapper::operators_s() {
  const Lock lock(swap_mutex());
  return times_.operators_s(*streams_);
}

// A stream of operators waits for a copy.
void StorageSwapper::wait(const StreamRef& stream, const EventRef& event, Wait why) {
  times_.around(*streams_, stream, [&] { streams_->wait(stream, event, why); });
}

StorageSwapper::User& StorageSwapper::user_of(const StreamRef& stream) {
  for (User& user : users_) {
    if (streams_->same(user.stream, stream)) {
      return user;
    }
  }
  return users_.emplace_back(User{stream});
}

void StorageSwapper::wait_for_return(const StreamRef& stream, int64_t began, const EventRef& event) {
  User& user = user_of(stream);
  if (user.waited < began) {
    wait(stream, event, Wait::USE_FOR_PREFETCH);
    user.waited = began;
  }
}

// The tensor's own stream, and the one that operators run on now where that is another.
void StorageSwapper::wait_on_its_streams(const Absent& absent, const EventRef& event, Wait why) {
  wait(absent.stream, event, why);
  if (!is_current(absent)) {
    wait(streams_->current(), event, why);
  }
}

// Its record, which is no longer among the others.
std::unique_ptr<StorageSwapper::Absent> StorageSwapper::take(Absent& absent) {
  absents().erase(absent.storage);
  if (const auto found = of_key_.find(absent.key); found != of_key_.end() && found->second == &absent) {
    of_key_.erase(found);
  }
  std::swap(all_[absent.position], all_.back());
  all_[absent.position]->position = absent.position;
  auto record = std::move(all_.back());
  all_.pop_back();
  return record;
}

#ifdef MEMPLUG_SWAPS_STORAGES
bool StorageSwapper::is_possible() {
  return true;
}
#else
bool StorageSwapper::is_possible() {
  return false;
}
#endif

// What deletes the pointer of a storage that is away: the storage is back, dies, or has got other memory.
void StorageSwapper::forget(void* host_memory) {
  const Lock lock(swap_mutex());
  const std::unique_ptr<HostMemory> host(static_cast<HostMemory*>(host_memory));
  if (host->absent == nullptr) {
    return;
  }
  StorageSwapper& swapper = *host->absent->swapper;
  auto record = swapper.take(*host->absent);
  if (record->passive) {
    note_free(static_cast<char*>(host->slab.mutable_data_ptr()) + record->slot.offset, record->nbytes);
    note_moved_out(record->state == State::AWAY ? -record->nbytes : 0);
  }
  if (record->state == State::RETURNING) {
    swapper.gone_.push_back(std::move(record));
  } else {
    swapper.pool_.give(record->slot);
  }
}

// Memory of storages that died goes once the copy in that uses it is ordered before what comes next.
void StorageSwapper::drain() {
  for (auto& record : std::exchange(gone_, {})) {
    wait(record->stream, record->prefetched, Wait::DISCARD_FOR_PREFETCH);
    pool_.give(record->slot);
    const Moving moving(record->passive);
    record.reset();
  }
}

} // namespace memplug
