// Moves the rows of swapped tensors between device and host: decides which rows move, when, and into which device
// memory. copies.h copies them.
//
// A `Swapped` tensor is in one of three states until it is gone (`drop`). Its copy out starts when memplug captures it;
// that of a region's input starts when an operator first reads the input. If `offload` was called with `later`, the
// copy starts only when the device memory has to be released.
//
//     resident ──release()──► away ──prefetch()──► prefetched ──drop()──► away ...
//        └── acquire() returns the tensor in any of them ──┘
//
// The owner of a tensor's memory (copies.h) is the stream on which the tensor's region ran forward. The region's
// backward runs on that stream too. A prefetch takes memory of that stream even if the backward of a region on another
// stream starts it. If an operator is about to write to the tensor in place before the copy out has started, memplug
// first copies the tensor on the device, on the owner, and makes the operator's stream wait for that copy.
//
// All device memory is used on its owner. So the caching allocator needs no `record_stream`, and memplug may use a
// rounding buffer again as soon as no tensor in it is alive (rule 2 of copies.h). There are three exceptions, which
// memplug records with the allocator: an input that another stream made; a tensor that a region's forward reads on
// another stream; and a tensor that backward or a recompute pass reads on another stream. In the last case `order_use`
// also makes this reader wait for the owner; each later copy into a rounding buffer first waits for all work that such
// readers have queued so far.
//
// Guarded by Python's lock, which the caller holds. Another thread may run Python while the host pool grows, or while
// memplug calls a device that is implemented in Python.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "clock.h"
#include "copies.h"
#include "rounding.h"
#include "tape.h"

namespace memplug {

// An error that memplug/tokenwise/engine/calls.py puts into words. `what()` is the shape of the tensor concerned.
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

// Whether a region has waited for the stream that made a tensor. UNREAD: perhaps not; the tensor is an input, which may
// come from another stream. READ: yes, since an operator has read the input, or the region itself made the tensor.
// ASSUMED: the forward of an opaque region has ended; it may have read the input without an operator, so memplug
// assumes that it has waited.
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
  // Returns whether only the host has the tensor. Returns false also for a tensor that is gone, since a backward that
  // did not keep its graph dropped it before any copy out.
  bool is_away() const {
    return !tensor.defined() && slot.has_value();
  }
  // Returns the first `rows` rows of the tensor on the device.
  at::Tensor device_rows() const;

  std::shared_ptr<Transfer> transfer;
  int64_t order = 0; // number of the copy out, in the order in which copies out start
  // the tensor on the device; undefined while it is away. It is dense, and covers its storage from offset 0.
  at::Tensor tensor;
  Geometry geometry;
  int64_t nbytes, rows; // bytes of all rows; number of rows that are copied to the host
  std::optional<Slot> slot; // place of the rows on the host; none until the copy out starts
  std::optional<Slot> promised; // place on the host that is reserved for the rows of an `UNREAD` tensor
  Ready ready = Ready::READ;
  // true: `tensor` has all rows; it is the original, or a copy of it on the device. false: the original was released;
  // once prefetched, `tensor` has only rows `[0, rows)`.
  bool resident = true;
  // the tensor was written to in place after it was captured: the capture has the value from before, and only a
  // recompute pass can repeat the write
  bool mutated = false;
  EventRef offloaded, prefetched; // ends of copies for which the tensor's stream has not waited yet
  uint32_t version; // the tensor's version when it was captured
  StreamRef stream; // owner of the tensor's device memory
  int64_t uses = 0, uses_left = 0; // number of reads in one backward: all, and those to come
  Place place; // where it was captured
  int64_t frame = 0; // number of the frame that needs it first; it is prefetched into that frame's rounding buffer
};

// Offloads, releases, prefetches and drops swapped tensors.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store)
      : copies(std::move(streams), std::move(store)), streams_(copies.streams()) {}

  // Starts copying rows `[0, rows)` of a dense device tensor to the host. Returns null if host memory is full. `later`:
  // start only when the tensor's device memory has to be released, which may never happen. `unread`: no operator has
  // read the tensor yet, so start in `note_read` at the earliest.
  std::shared_ptr<Swapped> offload(const at::Tensor& tensor, int64_t rows, bool later, bool unread = false);

  // Notes that an operator reads the tensor on the current stream, which therefore has waited for the stream that made
  // it. Starts the copy out if `offload` was called with `unread`, but not with `later`.
  void note_read(Swapped& swapped, Ready ready = Ready::READ);

  // Releases the device memory of resident tensors, ordered after the last of their copies out. A tensor stays if host
  // memory is full, or if it is `UNREAD`. Throws `SWAPPED_WAS_WRITTEN` if a tensor was written to without
  // `before_write`, since its copy may have the old or the new value.
  void release(std::vector<std::shared_ptr<Swapped>> group);

  // Prepares a captured tensor for an in-place write. If the copy out has started, makes the tensor's stream and the
  // current stream wait for it, and gives up the device memory. Otherwise copies the tensor to other device memory.
  void before_write(Swapped& swapped);

  // Starts prefetching a tensor if it is away, into a rounding buffer, or into new memory if no buffer has room. Takes
  // memory for all rows, not only for those on the host. Throws `DETACHED` after `close`, and `SWAPPED_IS_GONE` for a
  // tensor without host rows.
  void prefetch(Swapped& swapped);

  // Replaces the rounding buffers by `count` buffers of `nbytes` each, or by none if either is 0. Tensors in the former
  // buffers stay there. Returns false, without any rounding buffers, if the device has no room.
  bool reserve(size_t count, int64_t nbytes);

  // Returns the rounding buffers if they belong to the tensor's stream; else null (`prefetch` then takes new memory).
  const RoundingBuffers* buffers_of(const Swapped& swapped) const;

  // Returns the tensor on the device, prefetched if necessary, and how many of its first rows are valid. The tensor's
  // stream and the current stream may read these rows from now on.
  std::pair<at::Tensor, int64_t> acquire(Swapped& swapped);

  // Orders a read of a tensor on the current stream. If `owner`, which owns the tensor's memory, is another stream,
  // makes the current stream wait for it, and lets the allocator reuse the memory only after the read.
  void order_use(const at::Tensor& tensor, const StreamRef& owner);

  // Drops the tensor's device memory, after the last use in this backward. Rows on the host stay for a later backward.
  // A tensor without host rows is then gone: no graph needs it any more.
  void drop(const std::shared_ptr<Swapped>& swapped);

  void close() {
    copies.close();
    discard_buffers();
  }

  Streams& streams() {
    return streams_;
  }

  // Returns the bytes of all rounding buffers together.
  int64_t buffer_bytes() const {
    return rounding_ ? rounding_->nbytes() : 0;
  }

  Copies copies; // `Copies::drain` frees the memory of dead tensors
  int64_t prefetched_bytes = 0; // bytes on the device of prefetched tensors, until dropped
  int64_t resident_bytes = 0; // bytes on the device of captured tensors, until released
  int64_t offloads = 0; // number of copies out
  int64_t allocations = 0; // number of requests for device memory, rounding buffers excluded
  int64_t buffer_misses = 0; // number of prefetches that took new memory although there were rounding buffers

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
