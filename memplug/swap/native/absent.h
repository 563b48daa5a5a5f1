// The swapper's record of a storage that is leaving, away or returning; storage_swapper.h explains these states. Only
// storage_swapper.cpp, leaving.cpp and returning.cpp include this file.
#pragma once

#include "bus.h"
#include "clock.h"
#include "requests.h"
#include "storage_swapper.h"

namespace memplug {

// While an instance lives, the calling thread's operators count as memplug's own.
struct Own {
  const Suspension suspension;
  const Pause pause;
};

struct StorageSwapper::Absent {
  StorageSwapper* swapper;
  int64_t key;
  size_t position; // index of this record in the swapper's `all_`
  // never dangles: `held` owns the storage until its memory is released; if the storage dies later, torch calls
  // `forget`
  c10::StorageImpl* storage;
  c10::intrusive_ptr<c10::StorageImpl> held;
  const void* memory; // the storage's original device memory
  int64_t nbytes;
  Slot slot;
  StreamRef stream; // the stream that owns the device memory, see copies.h
  OffloadState state = OffloadState::LEAVING;
  // events that complete with the copy out and the copy in; null: `stream` need not wait
  EventRef offloaded, prefetched;
  HostMemory* host = nullptr; // context of the storage's `DataPtr` while the storage is away
  bool passive = false; // the storage left because a request failed; no list names it
  // the device had no room when torch asked for a writable pointer, so torch got the host memory: do not prefetch it
  bool written = false;
  c10::DataPtr arriving; // a returning storage's new device memory
  int64_t began = 0; // number of the storage's latest return, counted over all returns of the swapper, from 1
};

struct StorageSwapper::HostMemory {
  Absent* absent; // null once the storage is back, or the swapper is destroyed
  at::Tensor slab; // keeps the host memory alive while the storage points to it
};

} // namespace memplug
