// The storages that a forward has touched, by number.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace memplug {

class Storages {
 public:
  // Returns whether a tensor's memory is freed after forward and gathered elsewhere for backward (ZeRO 3).
  using Regathered = bool (*)(const at::Tensor&);

  // `regathered` may be null.
  explicit Storages(Regathered regathered) : regathered_(regathered) {}

  // Returns the number of a tensor's storage; -1 if it has none yet.
  int32_t find(const at::Tensor& tensor) const;

  // Numbers a tensor's storage and returns the number. `given`: it existed before, else an operator made it.
  int32_t add(const at::Tensor& tensor, bool given);

  // Gives the storage of a tensor the number of another storage, for which it stands.
  void alias(const at::Tensor& tensor, int32_t number);

  // Reserves space for `count` storages.
  void reserve(size_t count);

  // Forgets all addresses: from now on they no longer identify storages.
  void forget();

  bool regathers() const {
    return regathered_ != nullptr;
  }
  size_t size() const {
    return given.size();
  }

  // By number. A regathered parameter has a number of its own, even if it shares its storage.
  std::vector<bool> given, regathered;
  std::vector<int64_t> nbytes;
  std::vector<int64_t> origins; // the element that offsets count from

 private:
  // The bytes of a regathered parameter within a storage.
  struct Range {
    const char *begin, *end;
    int32_t number;
  };

  Regathered regathered_;
  ska::flat_hash_map<const void*, int32_t> numbers_; // by storage, or by tensor if irregular (layouts.h)
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<Range>> ranges_;
  // weak references, which keep a dead tensor's address from being reused
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> addresses_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> irregular_;
};

} // namespace memplug
