// Moves the rows of swapped tensors between device and host: decides which rows, when, and into what device memory.
// copies.h copies them.
//
// A `Swapped` tensor is in one of three states. Its copy out starts at once, or only when its device memory has to be
// released:
//
//     resident ──release()──► away ──prefetch()──► prefetched ──drop()──► away ...
//        └── acquire() returns the tensor in any of them ──┘
//
// The owner of a tensor's memory (copies.h) is the stream on which the tensor's region ran forward. The region's
// backward runs there too, even if a region on another stream starts the prefetch. If an operator writes to the tensor
// in place before a copy out has started, the owner first copies the tensor on the device, and the operator's stream
// waits for that copy.
//
// All device memory is used on its owner. So the caching allocator needs no `record_stream`, and a rounding buffer that
// the host finds free is safe by rule 2 of copies.h. Two exceptions are recorded with the allocator: an input that
// another stream made, and a tensor that a region's forward reads on another stream. If backward or a recompute pass
// reads a tensor on another stream, `order_use` orders the read. The reader's stream waits for the owner, and the
// allocator records the reader. Later, a copy into a rounding buffer starts only after all work that was queued on such
// readers by then.
//
// Guarded by Python's lock, which the caller holds. Another thread may run while the host pool grows, or while a device
// that is implemented in Python is called.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "copies.h"
#include "rounding.h"
#include "tape.h"

namespace memplug {

// An error that memplug/tokenwise/engine/core.py puts into words. `what()` is the size of the tensor that it is about.
struct Failure : std::runtime_error {
  enum FailureKind : uint8_t {
    KEPT_WAS_WRITTEN,
    SWAPPED_WAS_WRITTEN,
    GIVEN_WAS_WRITTEN,
    DETACHED,
    IRREGULAR_WAS_WRITTEN,
    ASKED_EARLY,
    GIVEN_WAS_TAKEN,
    SWAPPED_IS_GONE
  };
  Failure(FailureKind kind, at::IntArrayRef size);

  FailureKind kind;
};

class Transfer;

// Whether a tensor's values are ready for the streams that regions run on. READ: they are. UNREAD: the tensor is a
// region's input that may come from another stream, and code inside of the region may have yet to wait for that stream.
// The first operator that reads the input shows that it has waited. ASSUMED: the forward of an opaque region has ended.
// That region may have read the input without an operator, so it is assumed to have waited.
enum class Ready : uint8_t { UNREAD, ASSUMED, READ };

// A captured tensor whose first `rows` rows (of dimension 0) are copied to the host.
struct Swapped {
  Swapped(std::shared_ptr<Transfer> transfer, const at::Tensor& tensor, int64_t rows);
  ~Swapped();
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

  bool whole() const {
    return rows == geometry.size[0];
  }
  // Returns whether the tensor is on the host alone. False for a tensor that is gone: it never had a copy out, and a
  // backward that did not keep its graph has used it up.
  bool is_away() const {
    return !tensor.defined() && slot.has_value();
  }
  // Returns the first `rows` rows of the tensor on the device.
  at::Tensor device_rows() const;

  std::shared_ptr<Transfer> transfer;
  int64_t order = 0; // position of the copy out among all copies out
  at::Tensor tensor; // on the device, undefined while away; dense, covers its storage from offset 0
  Geometry geometry;
  int64_t nbytes, rows; // bytes of all rows; number of rows that are copied to the host
  std::optional<Slot> slot; // destination of the copy out; none until that starts
  std::optional<Slot> promised; // likewise, while the tensor is `UNREAD`
  Ready ready = Ready::READ;
  // true: `tensor` is the original, or a copy on the device, with all rows; false: only `[0, rows)`, once prefetched
  bool resident = true;
  bool mutated = false; // written in place after it was captured; only a recompute pass can repeat that write
  EventRef offloaded, prefetched; // ends of copies that its stream has not waited for yet
  uint32_t version; // the tensor's count of writes when it was captured
  StreamRef stream; // made the tensor, and owns its device memory
  int64_t uses = 0, uses_left = 0; // number of reads in one backward: all, and those to come
  int64_t frame = 0; // number of the frame that needs it first; it is prefetched into that frame's rounding buffer
};

// Offloads, releases, prefetches and drops swapped tensors.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store)
      : copies(std::move(streams), std::move(store)), streams_(copies.streams()) {}

  // Starts copying rows `[0, rows)` of a dense device tensor to the host. Returns null if the host has no room for
  // them. `later`: start only when the tensor's device memory is to be released, which may never happen. `unread`:
  // start with `note_read` at the earliest.
  std::shared_ptr<Swapped> offload(const at::Tensor& tensor, int64_t rows, bool later, bool unread = false);

  // Takes note that an operator reads the tensor on the current stream: this stream has waited for the one that made
  // the tensor. Starts the copy out if it was put off until now.
  void note_read(Swapped& swapped, Ready ready = Ready::READ);

  // Releases the device memory of resident tensors, ordered after the last of their copies out. A tensor stays if the
  // host has no room for it. Throws `SWAPPED_WAS_WRITTEN` if a tensor was written to without `before_write`: its copy
  // may have read the old or the new value.
  void release(std::vector<std::shared_ptr<Swapped>> group);

  // Prepares a captured tensor for an in-place write. If its copy out has started, makes its stream and the current
  // stream wait for the copy, and forgets the device memory. Else copies the tensor to device memory of its own.
  void before_write(Swapped& swapped);

  // Starts prefetching a tensor if it is away. Its device memory has the full size, and lies in a rounding buffer, or
  // is new if no buffer has room. Throws `DETACHED` after `close`, `SWAPPED_IS_GONE` for a tensor without host rows.
  void prefetch(Swapped& swapped);

  // Replaces the rounding buffers by `count` buffers of `nbytes` each, or by none if either is 0. Tensors in the former
  // buffers stay there. If the device has no room, returns false, and there are no rounding buffers.
  bool reserve(size_t count, int64_t nbytes);

  // Returns the rounding buffers if they belong to the tensor's stream; else null, and the tensor is prefetched into
  // new memory.
  const RoundingBuffers* buffers_of(const Swapped& swapped) const;

  // Returns the tensor on the device, prefetched if necessary, and the number of its first rows that are valid. From
  // now on the tensor's stream and the current stream may read these.
  std::pair<at::Tensor, int64_t> acquire(Swapped& swapped);

  // Orders a read of a tensor on the current stream. If `owner`, which owns the memory, is another stream, the current
  // stream waits for it, and the memory is reused only after the read.
  void order_use(const at::Tensor& tensor, const StreamRef& owner);

  // Drops the tensor's device memory, after the last use in this backward. Host rows stay for a further backward. A
  // tensor without host rows is then gone: no graph needs it any more.
  void drop(const std::shared_ptr<Swapped>& swapped);

  void close() {
    copies.close();
    discard_buffers();
  }

  Streams& streams() {
    return streams_;
  }

  // Returns the bytes of all rounding buffers.
  int64_t buffer_bytes() const {
    return rounding_ ? rounding_->nbytes() : 0;
  }

  Copies copies; // its `drain` frees the memory of dead tensors
  int64_t prefetched_bytes = 0; // on the device, in prefetched tensors that were not dropped
  int64_t resident_bytes = 0; // on the device, in captured tensors that were not released
  int64_t offloads = 0; // number of copies out
  int64_t allocations = 0; // number of requests for device memory, rounding buffers excluded
  int64_t buffer_misses = 0; // number of prefetches for which the rounding buffers had no room

 private:
  void discard_buffers();
  void send(Swapped& swapped, Slot slot);
  void send_late(Swapped& swapped);
  void copy_on_device(Swapped& swapped);
  void leave(Swapped& swapped);
  at::Tensor memory_for(const Swapped& swapped);
  static void check_version(const Swapped& swapped);

  Streams& streams_;
  std::vector<StreamRef> readers_; // streams that have read tensors owned by another stream
  std::unique_ptr<RoundingBuffers> rounding_;
};

// Returns whether the running backward keeps its graph; true if no backward is running.
bool keeps_graph();

// Returns whether a tensor covers its storage densely, so that its rows can be copied as they lie in memory.
bool is_dense(const at::Tensor& tensor);

// Returns a tensor with the same memory and version counter, but without a graph.
at::Tensor alias_of(const at::Tensor& tensor);

} // namespace memplug
