// Offloads storages that a list names, and others when a request for memory has failed (Chameleon, section 6.3).
#include <algorithm>

#include "absent.h"
#include "views.h"

namespace memplug {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// bytes; host memory is added in pieces of at least this size, or of all the room left
constexpr int64_t kHostSlab = 64 << 20;
constexpr int64_t kPassive = -1; // key of all storages that no list names

} // namespace

bool StorageSwapper::add_host_memory(int64_t nbytes) {
  const int64_t room = passive_room_ / kRowAlignment * kRowAlignment;
  if (nbytes > room) {
    return false;
  }
  const int64_t size = std::min(room, std::max(nbytes, kHostSlab));
  const Own own;
  try {
    pool_->add(streams_.host_memory(size));
  } catch (const std::exception&) { // the system has too little memory
    passive_room_ = 0;
    return false;
  }
  passive_room_ -= size;
  return true;
}

#ifdef MEMPLUG_SWAPS_STORAGES

// Starts the copy out of a storage, and returns its record; null: the storage stays.
StorageSwapper::Absent* StorageSwapper::start_leaving(const c10::Storage& storage, int64_t key) {
  copies_.drain();
  auto* const impl = storage.unsafeGetStorageImpl();
  const auto nbytes = static_cast<int64_t>(impl->nbytes());
  if (nbytes == 0 || impl->data() == nullptr || impl->allocator() == nullptr || !impl->resizable() ||
      impl->has_materializer() || streams_.is_capturing()) {
    return nullptr;
  }
  const Own own;
  const std::optional<Slot> slot = copies_.take(nbytes);
  if (!slot) {
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
  absent->stream = streams_.current();
  user_of(absent->stream);
  absent->offloaded = copies_.offload(bytes_at(absent->memory, nbytes, impl->device()), *slot, absent->stream);
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
  if (absent != nullptr && absent->state == OffloadState::LEAVING && is_current(*absent) && !streams_.is_capturing()) {
    leave(*absent);
  }
}

void StorageSwapper::leave(Absent& absent) {
  c10::StorageImpl& storage = *absent.storage;
  // the storage was resized
  if (storage.data() != absent.memory || static_cast<int64_t>(storage.nbytes()) != absent.nbytes) {
    stay(absent);
    return;
  }
  copies_.wait(absent.stream, absent.offloaded, Wait::RELEASE_FOR_OFFLOAD);
  absent.offloaded = nullptr;
  absent.state = OffloadState::AWAY;
  const at::Tensor& slab = pool_->slab(absent.slot);
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
  const c10::DataPtr released = std::exchange(pointer_of(storage), std::move(host));
  for (size_t i = 0; i < copies_.users().size() && !absent.passive; ++i) { // only one stream has used a passive storage
    streams_.use_on(copies_.users()[i], released);
  }
  const auto held = std::move(absent.held); // if this is the last reference, the storage dies and torch calls `forget`
}

// -- when a request fails ---------------------------------------------------------------------------------------------

int64_t StorageSwapper::release_leaving() {
  const Lock lock(swap_mutex());
  const int64_t before = counters_.released_bytes;
  std::vector<Absent*> leaving;
  for (const auto& absent : all_) {
    if (absent->state == OffloadState::LEAVING && is_current(*absent) && !streams_.is_capturing()) {
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

#else

bool StorageSwapper::offload(const c10::Storage&, int64_t) {
  return false;
}
void StorageSwapper::release(int64_t) {}
int64_t StorageSwapper::release_leaving() {
  return 0;
}
int64_t StorageSwapper::leave_now(const c10::Storage&) {
  return 0;
}

#endif

} // namespace memplug
