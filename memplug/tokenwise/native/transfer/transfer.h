// Swapped rows between device and host: which of them, when, and into what device memory. copies.h copies them.
//
// A `Swapped` tensor is in one of three states. Its copy out starts at once, or only when its memory has to be
// released:
//
//     resident ──release()──► away ──prefetch()──► prefetched ──drop()──► away ...
//        └── acquire() returns the tensor in any of them ──┘
//
// The owner of a tensor's memory (copies.h) is the stream that its region's forward ran on. Its backward runs there
// too, even if a region on another stream starts the copy. An operator that writes in place before there is a copy out
// does so after the owner's own copy. All device memory belongs to its owner, so the caching allocator needs no
// `record_stream`, and a rounding buffer that the host finds free is safe by rule 2. Two exceptions are recorded as
// uses: an input that another stream made, and tensors that a region's forward reads on another stream. If backward or
// a recompute pass reads a tensor on another stream, `order_use` orders that: the reader waits for the tensor's stream,
// the allocator records the reader, and a copy into a rounding buffer starts only after all work queued on such readers
// by then.
//
// Guarded by Python's lock: the caller holds it. Growing the pool, and a device in Python, may let another thread run.
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

// An error that memplug/tokenwise/engine/core.py puts into words; `what()` is the size of the tensor concerned.
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

// Whether a tensor's values are ready for the streams that regions run on. A region's input may come from a stream for
// which only code inside of the region waits: the first operator that reads the input shows that this has happened. An
// opaque region may read it without an operator, so the end of its forward is assumed to show the same.
enum class Ready : uint8_t { UNREAD, ASSUMED, READ };

// A tensor whose first `rows` rows of dimension 0 have a copy on the host.
struct Swapped {
  Swapped(std::shared_ptr<Transfer> transfer, const at::Tensor& tensor, int64_t rows);
  ~Swapped();
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

  bool whole() const {
    return rows == geometry.size[0];
  }
  // Returns whether it is on the host alone. False for a tensor that had no copy and that a backward without a kept
  // graph has used up.
  bool is_away() const {
    return !tensor.defined() && slot.has_value();
  }
  at::Tensor device_rows() const;

  std::shared_ptr<Transfer> transfer;
  int64_t order = 0; // position of its copy out among all copies out
  at::Tensor tensor; // the device memory, undefined while away; dense, covers its storage from offset 0
  Geometry geometry;
  int64_t nbytes, rows;
  std::optional<Slot> slot; // none until its copy out starts
  std::optional<Slot> promised; // while it is `UNREAD`: the destination of its copy out
  Ready ready = Ready::READ;
  // the original, or a copy of it on the device, with every row valid; later `[0, rows)` are prefetched
  bool resident = true;
  bool mutated = false; // overwritten in place after it was captured, which only a recompute pass can replay
  EventRef offloaded, prefetched; // those that its stream has not waited for yet
  uint32_t version;
  StreamRef stream; // made it, and owns its device memory
  int64_t uses = 0, uses_left = 0; // reads in one backward pass: all, and those to come
  int64_t frame = 0; // number of the frame that needs it first, into whose rounding buffer it is prefetched
};

// Offloads, releases, prefetches and drops swapped tensors.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store)
      : copies(std::move(streams), std::move(store)), streams_(copies.streams()) {}

  // Starts copying rows `[0, rows)` of a dense device tensor to the host; null if the host has no room for them.
  // `later`: start only when its device memory is to be released, which may never happen. `unread`: start with
  // `note_read` at the earliest.
  std::shared_ptr<Swapped> offload(const at::Tensor& tensor, int64_t rows, bool later, bool unread = false);

  // Takes note that an operator reads the tensor on the current stream, which has waited for the stream that made it.
  void note_read(Swapped& swapped, Ready ready = Ready::READ);

  // Releases the device memory of resident tensors, ordered after the last of their copies out. Throws
  // `SWAPPED_WAS_WRITTEN` if a tensor was written to meanwhile, so that the copy may have read either value.
  void release(std::vector<std::shared_ptr<Swapped>> group);

  // Prepares a captured tensor for an in-place write: lets the copy out finish, and forgets the device memory. If no
  // copy out has started, the tensor moves to memory of its own.
  void before_write(Swapped& swapped);

  // Starts prefetching a tensor that is away, into device memory of the full size: a rounding buffer, or new memory if
  // none has room. Throws `DETACHED` or `SWAPPED_IS_GONE`.
  void prefetch(Swapped& swapped);

  // Replaces the rounding buffers by `count` of `nbytes` each, or by none if either is 0. Returns false, and has none,
  // if the device has no room. Tensors in earlier buffers stay there.
  bool reserve(size_t count, int64_t nbytes);

  // Returns the rounding buffers if they belong to the tensor's stream; else null, and the tensor is prefetched into
  // new memory.
  const RoundingBuffers* buffers_of(const Swapped& swapped) const;

  // Returns the device tensor, and how many of its first rows its stream and the current one may read from now on.
  std::pair<at::Tensor, int64_t> acquire(Swapped& swapped);

  // Orders a read of a tensor on the current stream. If another stream, `owner`, owns the memory, the current stream
  // waits for it, and the memory is reused only after the read.
  void order_use(const at::Tensor& tensor, const StreamRef& owner);

  // Drops the device memory after its last use in this backward pass; the host rows stay for another pass. A tensor
  // without host rows is gone: no graph needs it any more.
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

  Copies copies; // `drain` frees memory that dead tensors held
  int64_t prefetched_bytes = 0; // on the device, in prefetched tensors that were not dropped
  int64_t resident_bytes = 0; // on the device, in captured tensors that were not released
  int64_t offloads = 0;
  int64_t allocations = 0; // of device memory, without rounding buffers
  int64_t buffer_misses = 0; // prefetches for which the rounding buffers had no room

 private:
  void discard_buffers();
  void send(Swapped& swapped, Slot slot);
  void send_late(Swapped& swapped);
  void copy_on_device(Swapped& swapped);
  void leave(Swapped& swapped);
  at::Tensor memory_for(const Swapped& swapped);
  static void check_version(const Swapped& swapped);

  Streams& streams_;
  std::vector<StreamRef> readers_; // read tensors of another stream
  std::unique_ptr<RoundingBuffers> rounding_;
};

// Returns whether the running backward keeps its graph; true outside of one.
bool keeps_graph();

// Returns whether a tensor covers its storage densely, so that its rows can be copied as they lie in memory.
bool is_dense(const at::Tensor& tensor);

// Returns a tensor with the same memory and version counter, without the graph.
at::Tensor alias_of(const at::Tensor& tensor);

} // namespace memplug
