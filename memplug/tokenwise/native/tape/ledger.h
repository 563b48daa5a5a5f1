// Bytes of saved tensors on the device, summed over all regions of one executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace memplug {

// The memory of restored tensors that autograd has received and not released.
class Restored {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.has_storage()) { // a sparse tensor
      return;
    }
    const auto& storage = tensor.storage();
    storages_.emplace_back(storage.getWeakStorageImpl(), static_cast<int64_t>(storage.nbytes()));
  }

  // Returns the bytes of the memory that is still alive, and forgets dead memory.
  int64_t nbytes() {
    int64_t total = 0;
    size_t kept = 0;
    for (auto& each : storages_) {
      if (!each.first.expired()) {
        total += each.second;
        if (&storages_[kept] != &each) {
          storages_[kept] = std::move(each);
        }
        ++kept;
      }
    }
    storages_.erase(storages_.begin() + static_cast<int64_t>(kept), storages_.end());
    return total;
  }

 private:
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, int64_t>> storages_;
};

struct Ledger {
  int64_t recomputed_bytes = 0; // bytes of tensors that recompute passes restored and backward has not taken
  Restored restored;
  int64_t waiting = 0; // number of captured tensors that only the host has and that backward will ask for
};

} // namespace memplug
