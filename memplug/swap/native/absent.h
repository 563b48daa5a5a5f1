// A storage on its way: what storage_swapper.cpp, leaving.cpp and returning.cpp know of it.
#pragma once

#include "bus.h"
#include "clock.h"
#include "requests.h"
#include "storage_swapper.h"

namespace memplug {

// Operators inside are memplug's own.
struct Own {
  const Suspension suspension;
  const Pause pause;
};

struct StorageSwapper::Absent {
  StorageSwapper* swapper;
  int64_t key;
  size_t position; // among its swapper's
  c10::StorageImpl* storage; // lives: `held` until it is away, and then `forget` says when it dies
  c10::intrusive_ptr<c10::StorageImpl> held;
  const void* memory; // of the device, that it leaves
  int64_t nbytes;
  Slot slot;
  StreamRef stream; // that its device memory belongs to
  State state = State::LEAVING;
  EventRef offloaded, prefetched; // that its stream has not waited for yet
  HostMemory* host = nullptr; // the context of its pointer while it is away
  bool passive = false; // no plan has it
  bool written = false; // to its memory of the host, since the device had no room: it returns in no operator's time
  c10::DataPtr arriving; // device memory that it returns to
  int64_t began = 0; // its return, of all returns
};

struct StorageSwapper::HostMemory {
  Absent* absent; // null: the storage is back, or its swapper gone
  at::Tensor slab; // may still be read
};

} // namespace memplug
