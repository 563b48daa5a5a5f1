#include "storages.h"

#include "layouts.h"

namespace memplug {

int64_t memory_bytes(const at::Tensor& tensor) {
  if (tensor.has_storage()) {
    return static_cast<int64_t>(is_irregular(tensor) ? tensor.storage().nbytes() : tensor.nbytes());
  }
  if (tensor.is_sparse()) {
    return static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
  }
  if (!tensor.is_sparse_csr()) {
    return 0;
  }
  const bool by_rows = tensor.layout() == at::kSparseCsr || tensor.layout() == at::kSparseBsr;
  const at::Tensor compressed = by_rows ? tensor.crow_indices() : tensor.ccol_indices();
  const at::Tensor others = by_rows ? tensor.col_indices() : tensor.row_indices();
  return static_cast<int64_t>(tensor.values().nbytes() + compressed.nbytes() + others.nbytes());
}

int32_t Storages::find(const at::Tensor& tensor) const {
  if (is_irregular(tensor)) {
    const auto found = numbers_.find(tensor.unsafeGetTensorImpl());
    return found != numbers_.end() ? found->second : -1;
  }
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (!ranges_.empty()) {
    if (const auto ranges = ranges_.find(storage); ranges != ranges_.end()) {
      const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
      for (const Range& range : ranges->second) {
        if (begin == range.begin || (begin > range.begin && begin < range.end)) {
          return range.number;
        }
      }
      return -1;
    }
  }
  const auto found = numbers_.find(storage);
  return found != numbers_.end() ? found->second : -1;
}

int32_t Storages::add(const at::Tensor& tensor, bool is_given) {
  const auto number = static_cast<int32_t>(size());
  if (is_irregular(tensor)) {
    numbers_[tensor.unsafeGetTensorImpl()] = number;
    irregular_.emplace_back(tensor.getIntrusivePtr());
    given.push_back(is_given);
    regathered.push_back(false);
    origins.push_back(0);
    nbytes.push_back(0);
    return number;
  }
  const auto& storage = tensor.storage();
  const bool is_regathered = is_given && regathered_ != nullptr && tensor.is_leaf() && regathered_(tensor);
  if (is_regathered) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    ranges_[storage.unsafeGetStorageImpl()].push_back({begin, begin + tensor.nbytes(), number});
  } else {
    numbers_[storage.unsafeGetStorageImpl()] = number;
  }
  addresses_.emplace_back(storage.getWeakStorageImpl());
  given.push_back(is_given);
  regathered.push_back(is_regathered);
  origins.push_back(is_regathered ? tensor.storage_offset() : 0);
  nbytes.push_back(static_cast<int64_t>(is_regathered ? tensor.nbytes() : storage.nbytes()));
  return number;
}

void Storages::alias(const at::Tensor& tensor, int32_t number) {
  numbers_[tensor.storage().unsafeGetStorageImpl()] = number;
  addresses_.emplace_back(tensor.storage().getWeakStorageImpl());
}

void Storages::reserve(size_t count) {
  numbers_.reserve(count);
  addresses_.reserve(count);
  nbytes.reserve(count);
  origins.reserve(count);
}

void Storages::forget() {
  numbers_.clear();
  ranges_.clear();
  addresses_.clear();
  irregular_.clear();
}

} // namespace memplug
