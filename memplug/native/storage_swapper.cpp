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

// The tensor's own stream, and the one that operators run on now where that is another.
void StorageSwapper::wait_on_its_streams(const Absent& absent, const EventRef& event, Wait why) {
  streams_->wait(absent.stream, event, why);
  if (!is_current(absent)) {
    streams_->wait(streams_->current(), event, why);
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

// Starts the copy out; null: it stays.
StorageSwapper::Absent* StorageSwapper::start_leaving(const c10::Storage& storage, int64_t key) {
  drain();
  auto* const impl = storage.unsafeGetStorageImpl();
  const auto nbytes = static_cast<int64_t>(impl->nbytes());
  if (nbytes == 0 || impl->data() == nullptr || impl->allocator() == nullptr || !impl->resizable() ||
      impl->has_materializer() || streams_->is_capturing()) {
    return nullptr;
  }
  const Own own;
  const std::optional<Slot> slot = pool_.take(nbytes);
  if (!slot) {
    ++counters_.refused;
    return nullptr;
  }
  auto absent = std::make_unique<Absent>();
  absent->swapper = this;
  absent->key = key;
  absent->storage = impl;
  absent->held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl);
  absent->memory = impl->data();
  absent->nbytes = nbytes;
  absent->slot = *slot;
  absent->stream = streams_->current();
  if (std::none_of(compute_streams_.begin(), compute_streams_.end(), [&](const StreamRef& known) {
        return streams_->same(known, absent->stream);
      })) {
    compute_streams_.push_back(absent->stream);
  }
  for (const StreamRef& stream : compute_streams_) { // what read these bytes of the host before ran on one of them
    streams_->wait(offload_stream_, streams_->record(stream), Wait::OFFLOAD_FOR_COMPUTE);
  }
  streams_->offload(offload_stream_, pool_.slab(*slot), slot->offset, absent->memory, nbytes, impl->device());
  absent->offloaded = streams_->record(offload_stream_);
  impl->set_materializer(&before_write);
  absents()[impl] = absent.get();
  of_key_.emplace(key, absent.get());
  absent->position = all_.size();
  all_.push_back(std::move(absent));
  return all_.back().get();
}

bool StorageSwapper::offload(const c10::Storage& storage, int64_t key) {
  const Lock lock(swap_mutex());
  const Absent* const absent = start_leaving(storage, key);
  if (absent != nullptr) {
    ++counters_.offloads;
    counters_.offloaded_bytes += absent->nbytes;
  }
  return absent != nullptr;
}

void StorageSwapper::release(int64_t key) {
  const Lock lock(swap_mutex());
  Absent* const absent = find(key);
  if (absent != nullptr && absent->state == State::LEAVING && is_current(*absent) && !streams_->is_capturing()) {
    leave(*absent);
  }
}

void StorageSwapper::leave(Absent& absent) {
  c10::StorageImpl& storage = *absent.storage;
  if (storage.data() != absent.memory || static_cast<int64_t>(storage.nbytes()) != absent.nbytes) { // it was resized
    stay(absent);
    return;
  }
  streams_->wait(absent.stream, absent.offloaded, Wait::RELEASE_FOR_OFFLOAD);
  absent.offloaded = nullptr;
  absent.state = State::AWAY;
  const at::Tensor& slab = pool_.slab(absent.slot);
  absent.host = new HostMemory{&absent, slab};
  c10::DataPtr host(
      static_cast<char*>(slab.mutable_data_ptr()) + absent.slot.offset, absent.host, &forget, storage.device());
  if (absent.passive) {
    note_moved(const_cast<void*>(absent.memory), host.get());
    note_moved_out(absent.nbytes);
  } else {
    ++counters_.releases;
    counters_.released_bytes += absent.nbytes;
  }
  const Moving moving(absent.passive);
  const c10::DataPtr released = std::exchange(storage._mutable_data_ptr_no_checks(), std::move(host));
  const auto held = std::move(absent.held); // if it is the last one, `forget` is called
}

void StorageSwapper::prefetch(int64_t key) {
  const Lock lock(swap_mutex());
  Absent* const absent = find(key);
  if (absent != nullptr && absent->state == State::AWAY && !absent->written && is_current(*absent) &&
      !streams_->is_capturing()) {
    start_return(*absent);
  }
}

// False: the device has no room.
bool StorageSwapper::start_return(Absent& absent) {
  drain();
  const Own own;
  const Moving moving(absent.passive);
  try {
    absent.arriving = streams_->allocate(absent.stream, absent.nbytes);
  } catch (const c10::OutOfMemoryError&) {
    ++counters_.refused;
    return false;
  }
  streams_->wait(prefetch_stream_, streams_->record(absent.stream), Wait::PREFETCH_FOR_COMPUTE);
  streams_->prefetch(
      prefetch_stream_,
      absent.arriving.get(),
      pool_.slab(absent.slot),
      absent.slot.offset,
      absent.nbytes,
      absent.storage->device());
  absent.prefetched = streams_->record(prefetch_stream_);
  absent.state = State::RETURNING;
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
  wait_on_its_streams(absent, absent.prefetched, Wait::USE_FOR_PREFETCH);
  const auto record = take(absent);
  record->host->absent = nullptr;
  record->storage->clear_materializer();
  pool_.give(record->slot);
  c10::DataPtr& pointer = record->storage->_mutable_data_ptr_no_checks();
  if (record->passive) {
    note_moved(pointer.get(), record->arriving.get());
  }
  std::swap(pointer, record->arriving);
}

// It has not left, and does not.
void StorageSwapper::stay(Absent& absent) {
  ++counters_.cancelled;
  wait_on_its_streams(absent, absent.offloaded, Wait::MUTATE_FOR_OFFLOAD);
  const auto record = take(absent);
  record->storage->clear_materializer();
  pool_.give(record->slot);
}

// False: the device has no room.
bool StorageSwapper::bring_back(Absent& absent) {
  if (absent.state == State::LEAVING) {
    stay(absent);
    return true;
  }
  if (absent.state == State::AWAY && !start_return(absent)) {
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

void StorageSwapper::use(const c10::StorageImpl* storage) {
  const Lock lock(swap_mutex());
  const auto found = absents().find(storage);
  if (found != absents().end() && found->second->swapper == this) {
    counters_.demanded += found->second->state != State::LEAVING && !found->second->passive;
    bring_back(*found->second);
  }
}

// Torch is about to hand out a pointer to write to.
void StorageSwapper::before_write(c10::StorageImpl* storage) {
  const Lock lock(swap_mutex());
  const auto found = absents().find(storage);
  if (found != absents().end()) {
    Absent& absent = *found->second;
    absent.swapper->counters_.demanded += absent.state != State::LEAVING && !absent.passive;
    if (!absent.swapper->bring_back(absent)) {
      absent.written = true;
    }
  }
}

bool StorageSwapper::restore_all() {
  const Lock lock(swap_mutex());
  drain();
  std::vector<Absent*> away;
  for (const auto& absent : all_) {
    away.push_back(absent.get());
  }
  bool all = true;
  for (Absent* const absent : away) {
    all = bring_back(*absent) && all;
  }
  return all;
}

#else

bool StorageSwapper::is_possible() {
  return false;
}
bool StorageSwapper::offload(const c10::Storage&, int64_t) {
  return false;
}
void StorageSwapper::release(int64_t) {}
void StorageSwapper::prefetch(int64_t) {}
void StorageSwapper::restore(int64_t) {}
void StorageSwapper::use(const c10::StorageImpl*) {}
bool StorageSwapper::restore_all() {
  return true;
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
    streams_->wait(record->stream, record->prefetched, Wait::DISCARD_FOR_PREFETCH);
    pool_.give(record->slot);
    const Moving moving(record->passive);
    record.reset();
  }
}

} // namespace memplug
