// Interface of a store for rows that are away from the device, such as pinned host memory (host_rows.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "streams.h"

namespace memplug {

// Bytes `[offset, offset + size)` of slab `slab`, of which `nbytes` were requested.
struct Slot {
  size_t slab;
  int64_t offset, size, nbytes;
};

class RowStore {
 public:
  virtual ~RowStore() = default;

  // Reserves space; returns empty if there is none.
  virtual std::optional<Slot> take(int64_t nbytes) = 0;

  // Releases a slot. The caller must have ordered all copies of the slot before the next use of its bytes.
  virtual void give(const Slot& slot) = 0;

  // `copy_out` queues a copy of device rows to a slot of their size. `copy_in` queues a copy back to rows of the same
  // shape, strides and dtype. Later work of the stream runs after the copy.
  virtual void copy_out(Streams& streams, const StreamRef& stream, const Slot& slot, const at::Tensor& rows) = 0;
  virtual void copy_in(Streams& streams, const StreamRef& stream, const at::Tensor& rows, const Slot& slot) = 0;
};

} // namespace memplug
