// Rows of pinned host memory, cut out of a few slabs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <vector>

namespace memplug {

constexpr int64_t kRowAlignment = 512; // bytes

// Bytes `[offset, offset + size)` of one slab, of which `nbytes` were asked for.
struct Slot {
  size_t slab;
  int64_t offset, size, nbytes;
};

// First-fit in the order of slabs and offsets; neighbours merge when they are given back, so that a run with many
// sequence lengths does not grow without bound (ProTrain, appendix B.2). Guarded by Python's lock.
class HostRows {
 public:
  // `grow(nbytes)` adds a slab with room for so many bytes, or returns false.
  explicit HostRows(std::function<bool(int64_t)> grow) : grow_(std::move(grow)) {}

  // Empty where there is no room, and no slab could be added.
  std::optional<Slot> take(int64_t nbytes);

  // The caller has ordered every copy of the slot before the next use of these rows.
  void give(const Slot& slot);

  // A slab: 1-D uint8, of a multiple of the alignment.
  void add(at::Tensor slab);

  // All slabs and slots are gone.
  void clear();

  const at::Tensor& slab(const Slot& slot) const {
    return slabs_.at(slot.slab).memory;
  }

  int64_t used_bytes = 0;
  int64_t limit_bytes = std::numeric_limits<int64_t>::max(); // of those in use, whatever the slabs have: of tests
  int64_t peak_bytes = 0, recent_peak_bytes = 0; // the latter since it was last set

 private:
  struct Slab {
    at::Tensor memory;
    std::map<int64_t, int64_t> holes; // size by offset
  };

  std::optional<Slot> find(int64_t size, int64_t nbytes);

  std::function<bool(int64_t)> grow_;
  std::vector<Slab> slabs_;
};

} // namespace memplug
