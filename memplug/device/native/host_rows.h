// Stores rows in slots that are cut out of a few slabs of pinned host memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "row_store.h"

namespace memplug {

constexpr int64_t kRowAlignment = 512; // bytes; HOST_ROW_BYTES in memplug/sizes.py

// Serves a request from the first hole (a free range of a slab) that is large enough, in the order of slabs and
// offsets. Neighbouring holes merge, so that the pool does not grow without bound in a run with many sequence lengths
// (ProTrain, appendix B.2). The lock that guards the `Copies` of this store guards the store too (copies.h).
class HostRows final : public RowStore {
 public:
  // `grow(nbytes)` adds a slab that has space for `nbytes`, or returns false.
  explicit HostRows(std::function<bool(int64_t)> grow) : grow_(std::move(grow)) {}

  // Returns empty if there is no space, and `grow` could not add a slab.
  std::optional<Slot> take(int64_t nbytes) override;
  void give(const Slot& slot) override;

  // Dense rows keep their layout in the slot; other rows are stored contiguously.
  void copy_out(Streams& streams, const StreamRef& stream, const Slot& slot, const at::Tensor& rows) override;
  void copy_in(Streams& streams, const StreamRef& stream, const at::Tensor& rows, const Slot& slot) override;

  // Adds a slab: a 1-D uint8 tensor whose size is a multiple of kRowAlignment.
  void add(at::Tensor slab);

  // Drops all slabs and slots.
  void clear();

  const at::Tensor& slab(const Slot& slot) const {
    return slabs_.at(slot.slab).memory;
  }

  int64_t used_bytes = 0;
  // bytes; `recent_peak_bytes`: since the last `take_peak_bytes` in Python
  int64_t peak_bytes = 0, recent_peak_bytes = 0;

 private:
  struct Slab {
    at::Tensor memory;
    std::map<int64_t, int64_t> holes; // from offset to size, bytes
  };

  std::optional<Slot> find(int64_t size, int64_t nbytes);
  at::Tensor rows_at(const Slot& slot, const at::Tensor& rows) const;

  std::function<bool(int64_t)> grow_;
  std::vector<Slab> slabs_;
};

} // namespace memplug
