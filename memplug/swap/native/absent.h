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
  size_t position; // its index in the swapper's `all_`
  c10::StorageImpl* storage; // alive: `held` owns it until it is away; after that, `forget` is called if it dies
  c10::intrusive_ptr<c10::StorageImpl> held;
  const void* memory; // the storage's device memory, which it leaves
  int64_t nbytes;
  Slot slot;
  StreamRef stream; // owner of the device memory
  OffloadState state = OffloadState::LEAVING;
  EventRef offloaded, prefetched; // ends of copies that `stream` has not waited for yet
  HostMemory* host = nullptr; // the context of the storage's pointer while it is away
  bool passive = false; // the storage left because a request failed; no list names it
  bool written = false; // written on the host, for lack of room on the device: not prefetched any more
  c10::DataPtr arriving; // the device memory to which the storage returns
  int64_t began = 0; // number of its return among the swapper's returns, from 1
};

struct StorageSwapper::HostMemory {
  Absent* absent; // null: the storage is back, or its swapper is gone
  at::Tensor slab; // keeps the host memory alive, since it may still be read
};

} // namespace memplug
