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
    : pool_(std::make_shared<HostRows>([this](int64_t nbytes) { return add_host_memory(nbytes); })),
      copies_(std::move(streams), pool_),
      streams_(copies_.streams()),
      passive_room_(passive_bytes) {
  if (slab.defined()) {
    pool_->add(std::move(slab));
  }
}

StorageSwapper::~StorageSwapper() {
  const Lock lock(swap_mutex());
  copies_.drain();
  for (const auto& absent : all_) { // the device had no room for these storages: they stay on the host for good
    absents().erase(absent->storage);
    if (absent->passive && absent->state == OffloadState::AWAY) {
      note_moved_out(-absent->nbytes);
    }
    if (absent->host != nullptr) {
      absent->host->absent = nullptr;
    }
  }
}

int64_t StorageSwapper::host_bytes() {
  const Lock lock(swap_mutex());
  return pool_->used_bytes;
}

SwapCounters StorageSwapper::counters() {
  const Lock lock(swap_mutex());
  SwapCounters all = counters_;
  all.refused += copies_.refused;
  return all;
}

StorageSwapper::Absent* StorageSwapper::find(int64_t key) const {
  const auto found = of_key_.find(key);
  return found == of_key_.end() ? nullptr : found->second;
}

bool StorageSwapper::has(const c10::StorageImpl* storage) const {
  return absents().find(storage) != absents().end();
}

bool StorageSwapper::is_current(const Absent& absent) {
  return streams_.same(streams_.current(), absent.stream);
}

void StorageSwapper::measure(bool waits, bool operators) {
  const Lock lock(swap_mutex());
  copies_.times.measure(waits, operators);
}

std::optional<double> StorageSwapper::waited_s() {
  const Lock lock(swap_mutex());
  return copies_.times.waited_s(streams_);
}

std::optional<std::vector<double>> StorageSwapper::operators_s() {
  const Lock lock(swap_mutex());
  return copies_.times.operators_s(streams_);
}

// Returns a stream's index among the users of `copies_`; a new stream becomes a user.
size_t StorageSwapper::user_of(const StreamRef& stream) {
  const size_t user = copies_.note_user(stream);
  waited_.resize(copies_.users().size());
  return user;
}

void StorageSwapper::wait_for_return(size_t user, int64_t began, const EventRef& event) {
  if (waited_[user] < began) {
    copies_.wait(copies_.users()[user], event, Wait::USE_FOR_PREFETCH);
    waited_[user] = began;
  }
}

// Removes a storage's record from all tables, and returns it.
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

// Called when torch deletes the host pointer of a storage that was away: the storage is back, has died, or has got
// other memory.
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
    note_moved_out(record->state == OffloadState::AWAY ? -record->nbytes : 0);
  }
  if (record->state != OffloadState::RETURNING) {
    swapper.copies_.give(record->slot);
    return;
  }
  const std::shared_ptr<Absent> gone = std::move(record);
  swapper.copies_.abandon({gone->stream, gone->prefetched, nullptr, gone->slot, [gone] {
                             const Moving moving(gone->passive);
                             gone->arriving.clear();
                           }});
}

} // namespace memplug
