// The record of a storage that is leaving, away or returning (the states in storage_swapper.h); for
// storage_swapper.cpp, leaving.cpp and returning.cpp.
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
  size_t position; // index of this record in the swapper's `all_`
  // never dangles: `held` owns the storage until it is away; if it dies after that, torch calls `forget`
  c10::StorageImpl* storage;
  c10::intrusive_ptr<c10::StorageImpl> held;
  const void* memory; // the storage's original device memory
  int64_t nbytes;
  Slot slot;
  StreamRef stream; // the stream that the device memory belongs to
  OffloadState state = OffloadState::LEAVING;
  EventRef offloaded, prefetched; // events at the ends of copies; null if `stream` need not wait for the copy
  HostMemory* host = nullptr; // context of the storage's `DataPtr` while the storage is away
  bool passive = false; // the storage left because a request failed; no list names it
  // torch asked for a pointer to write to, and got host memory, since the device had no room: never prefetched
  bool written = false;
  c10::DataPtr arriving; // the device memory to which the storage returns
  int64_t began = 0; // number of the storage's latest return; the swapper counts all returns, from 1
};

struct StorageSwapper::HostMemory {
  Absent* absent; // null once the storage is back, or its swapper is destroyed
  at::Tensor slab; // keeps the host memory alive, since it may still be read
};

} // namespace memplug
