// The record of a storage that is leaving, away or returning; for storage_swapper.cpp, leaving.cpp and returning.cpp.
#pragma once

#include "bus.h"
#include "clock.h"
#include "requests.h"
#include "storage_swapper.h"

namespace memplug {

// Marks operators in its scope as memplug's own.
struct Own {
  const Suspension suspension;
  const Pause pause;
};

struct StorageSwapper::Absent {
  StorageSwapper* swapper;
  int64_t key;
  size_t position; // in the swapper's `all_`
  c10::StorageImpl* storage; // alive: `held` owns it until it is away; from then on, `forget` is called when it dies
  c10::intrusive_ptr<c10::StorageImpl> held;
  const void* memory; // device memory that it leaves
  int64_t nbytes;
  Slot slot;
  StreamRef stream; // stream that its device memory belongs to
  OffloadState state = OffloadState::LEAVING;
  EventRef offloaded, prefetched; // ends of copies that its stream has not waited for yet
  HostMemory* host = nullptr; // the context of its pointer while it is away
  bool passive = false; // no list names it: it left because a request failed
  bool written = false; // written to on the host, since the device had no room: it is not prefetched any more
  c10::DataPtr arriving; // device memory that it returns to
  int64_t began = 0; // number of its return, in the order in which returns began
};

struct StorageSwapper::HostMemory {
  Absent* absent; // null: the storage is back, or its swapper is gone
  at::Tensor slab; // keeps the host memory alive, since it may still be read
};

} // namespace memplug
