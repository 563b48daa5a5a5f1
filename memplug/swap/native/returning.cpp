// Brings storages back to the device.
#include <utility>

#include "absent.h"
#include "views.h"

namespace memplug {

using Lock = std::lock_guard<std::recursive_mutex>;

#ifdef MEMPLUG_SWAPS_STORAGES

void StorageSwapper::prefetch(int64_t key) {
  const Lock lock(swap_mutex());
  Absent* const absent = find(key);
  if (absent != nullptr && absent->state == OffloadState::AWAY && !absent->written && is_current(*absent) &&
      !streams_.is_capturing()) {
    start_return(*absent);
  }
}

// Starts the copy in of a storage. False: the device has no room.
bool StorageSwapper::start_return(Absent& absent) {
  copies_.drain();
  const Own own;
  const Moving moving(absent.passive);
  try {
    absent.arriving = streams_.allocate(absent.stream, absent.nbytes);
  } catch (const c10::OutOfMemoryError&) {
    ++counters_.refused;
    return false;
  }
  absent.prefetched = copies_.prefetch(
      bytes_at(absent.arriving.get(), absent.nbytes, absent.storage->device()), absent.slot, absent.stream);
  absent.state = OffloadState::RETURNING;
  absent.began = ++returns_;
  if (absent.passive) {
    note_moved_out(-absent.nbytes);
  } else {
    ++counters_.prefetches;
    counters_.prefetched_bytes += absent.nbytes;
  }
  return true;
}

void StorageSwapper::arrive(Absent& absent) {
  wait_for_return(user_of(absent.stream), absent.began, absent.prefetched);
  wait_for_return(user_of(streams_.current()), absent.began, absent.prefetched);
  if (absent.began > arrived_) {
    arrived_ = absent.began;
    last_arrival_ = absent.prefetched;
  }
  returned_.insert(absent.storage);
  const auto record = take(absent);
  record->host->absent = nullptr;
  record->storage->clear_materializer();
  copies_.give(record->slot);
  c10::DataPtr& pointer = pointer_of(*record->storage);
  if (record->passive) {
    note_moved(pointer.get(), record->arriving.get());
  }
  std::swap(pointer, record->arriving);
}

// Cancels an offload before the memory is released.
void StorageSwapper::stay(Absent& absent) {
  ++counters_.cancelled;
  copies_.wait_on_its_streams(absent.stream, absent.offloaded, Wait::MUTATE_FOR_OFFLOAD);
  const auto record = take(absent);
  record->storage->clear_materializer();
  copies_.give(record->slot);
}

// Restores a storage in any state. False: the device has no room.
bool StorageSwapper::bring_back(Absent& absent) {
  if (absent.state == OffloadState::LEAVING) {
    stay(absent);
    return true;
  }
  if (absent.state == OffloadState::AWAY && !start_return(absent)) {
    return false;
  }
  arrive(absent);
  return true;
}

void StorageSwapper::restore(int64_t key) {
  const Lock lock(swap_mutex());
  if (Absent* const absent = find(key)) {
    bring_back(*absent);
  }
}

bool StorageSwapper::order_use() {
  const Lock lock(swap_mutex());
  if (const int64_t number = streams_.current_number(); copies_.users().empty() || number != newest_stream_) {
    newest_stream_ = number;
    newest_user_ = user_of(streams_.current());
  }
  wait_for_return(newest_user_, arrived_, last_arrival_);
  return !all_.empty() || (copies_.users().size() > 1 && !returned_.empty());
}

void StorageSwapper::use(const c10::StorageImpl* storage) {
  const Lock lock(swap_mutex());
  // A returned storage has new memory; tell the allocator that this stream uses it too.
  if (copies_.users().size() > 1 && returned_.find(storage) != returned_.end()) {
    streams_.use_on(streams_.current(), storage->data_ptr());
  }
  const auto found = absents().find(storage);
  if (found != absents().end() && found->second->swapper == this) {
    counters_.demanded += found->second->state != OffloadState::LEAVING && !found->second->passive;
    bring_back(*found->second);
  }
}

// Called by torch before it hands out a writable pointer.
void StorageSwapper::before_write(c10::StorageImpl* storage) {
  const Lock lock(swap_mutex());
  const auto found = absents().find(storage);
  if (found != absents().end()) {
    Absent& absent = *found->second;
    absent.swapper->counters_.demanded += absent.state != OffloadState::LEAVING && !absent.passive;
    if (!absent.swapper->bring_back(absent)) {
      absent.written = true;
    }
  }
}

bool StorageSwapper::restore_all() {
  const Lock lock(swap_mutex());
  copies_.drain();
  std::vector<Absent*> away;
  for (const auto& absent : all_) {
    away.push_back(absent.get());
  }
  bool all = true;
  for (Absent* const absent : away) {
    all = bring_back(*absent) && all;
  }
  // every stream waits now, since operators between steps are not seen
  for (size_t user = 0; user < copies_.users().size() && last_arrival_ != nullptr; ++user) {
    wait_for_return(user, arrived_, last_arrival_);
  }
  returned_.clear();
  return all;
}

int64_t StorageSwapper::turn_back() {
  const Lock lock(swap_mutex());
  Absent* last = nullptr;
  for (const auto& absent : all_) {
    if (absent->state == OffloadState::RETURNING && is_current(*absent) &&
        (last == nullptr || absent->began > last->began)) {
      last = absent.get();
    }
  }
  if (last == nullptr || streams_.is_capturing()) {
    return 0;
  }
  copies_.wait(last->stream, last->prefetched, Wait::DISCARD_FOR_PREFETCH);
  last->prefetched = nullptr;
  last->state = OffloadState::AWAY;
  if (last->passive) {
    note_moved_out(last->nbytes);
  }
  const Moving moving(last->passive);
  last->arriving.clear();
  return last->nbytes;
}

#else

void StorageSwapper::prefetch(int64_t) {}
void StorageSwapper::restore(int64_t) {}
bool StorageSwapper::order_use() {
  return false;
}
void StorageSwapper::use(const c10::StorageImpl*) {}
bool StorageSwapper::restore_all() {
  return true;
}
int64_t StorageSwapper::turn_back() {
  return 0;
}

#endif

} // namespace memplug
