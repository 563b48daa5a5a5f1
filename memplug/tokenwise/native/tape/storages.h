// Numbers the storages that a forward touches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace memplug {

class Storages {
 public:
  // Returns whether a tensor's memory is freed after forward, and gathered again at another address for backward (a
  // parameter under ZeRO 3).
  using Regathered = bool (*)(const at::Tensor&);

  // `regathered`: null without ZeRO 3.
  explicit Storages(Regathered regathered) : regathered_(regathered) {}

  // Returns the number of a tensor's storage; -1 if it has none yet.
  int32_t find(const at::Tensor& tensor) const;

  // Gives a tensor's storage the next number, and returns the number. `given`: the storage existed before the forward,
  // so no operator made it.
  int32_t add(const at::Tensor& tensor, bool given);

  // Gives a tensor's storage `number`, which is the number of the storage that it replaces.
  void alias(const at::Tensor& tensor, int32_t number);

  void reserve(size_t count);

  // Forgets all addresses: from now on `find` finds no storage.
  void forget();

  bool regathers() const {
    return regathered_ != nullptr;
  }
  size_t size() const {
    return given.size();
  }

  // by number of the storage; a regathered parameter has a number of its own, even if it shares its storage
  std::vector<bool> given, regathered;
  std::vector<int64_t> nbytes;
  std::vector<int64_t> origins; // for each storage, the element that tensors' offsets count from

 private:
  // The bytes of a regathered parameter within a storage.
  struct Range {
    const char *begin, *end;
    int32_t number;
  };

  Regathered regathered_;
  // by address of the storage, or of the tensor if irregular (layouts.h)
  ska::flat_hash_map<const void*, int32_t> numbers_;
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<Range>> ranges_;
  // weak references, which keep the address of a dead storage or tensor from being reused
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> addresses_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> irregular_;
};

} // namespace memplug
