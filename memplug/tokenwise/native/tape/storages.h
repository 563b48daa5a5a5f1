// The storages that a forward has touched, by number.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace memplug {

class Storages {
 public:
  // Whether a tensor's memory is freed after forward and gathered elsewhere for backward (ZeRO 3).
  using Regathered = bool (*)(const at::Tensor&);

  // `regathered` may be null.
  explicit Storages(Regathered regathered) : regathered_(regathered) {}

  // Number of a tensor's storage, -1 where it has none yet.
  int32_t find(const at::Tensor& tensor) const;

  // Gives it one. It is given, or an operator made it.
  int32_t add(const at::Tensor& tensor, bool given);

  // A tensor lies in a storage of its own that stands for another one.
  void alias(const at::Tensor& tensor, int32_t number);

  // About so many are to come.
  void reserve(size_t count);

  // Addresses name storages no more.
  void forget();

  bool regathers() const {
    return regathered_ != nullptr;
  }
  size_t size() const {
    return given.size();
  }

  // By number. A regathered parameter has one of its own, whatever it shares its storage with.
  std::vector<bool> given, regathered;
  std::vector<int64_t> nbytes;
  std::vector<int64_t> origins; // where offsets in it count from, elements

 private:
  // A regathered parameter's place in a storage.
  struct Range {
    const char *begin, *end;
    int32_t number;
  };

  Regathered regathered_;
  ska::flat_hash_map<const void*, int32_t> numbers_; // by storage, or by tensor where that is irregular (layouts.h)
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<Range>> ranges_;
  // nothing gets the address of what is gone
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> addresses_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> irregular_;
};

} // namespace memplug
