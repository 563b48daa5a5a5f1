// Rows on their way between device and host: which, when, and into what device memory. Copies are those of copies.h.
//
// A `Swapped` tensor is in one of three states; its copy out starts at once, or only when it has to go:
//
//     resident ──release()──► away ──prefetch()──► prefetched ──drop()──► away ...
//        └── acquire() hands out the tensor in any of them ──┘
//
// The owner of a tensor's memory (copies.h) is the stream that its region's forward ran on. Its backward runs there too, even
// where a region on another stream starts the copy. Where an operator writes in place before there is a copy out, it does so
// after the owner's own copy. All device memory belongs to its owner, so the caching allocator needs no `record_stream`, and a
// rounding buffer that the host finds free is safe by rule 2. An input that another stream made, and what a region's forward
// reads on another one, is recorded. Where backward or a recompute pass reads a tensor on another stream, `order_use` orders
// that: the reader waits for the tensor's stream, the allocator is told of the reader, and a copy into a rounding buffer starts
// only after the present of all such readers.
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

// An error that memplug/tokenwise/engine/core.py says in words; `what()` is the size of the tensor concerned.
struct Failure : std::runtime_error {
  enum Kind : uint8_t {
    KEPT_WAS_WRITTEN,
    SWAPPED_WAS_WRITTEN,
    GIVEN_WAS_WRITTEN,
    DETACHED,
    IRREGULAR_WAS_WRITTEN,
    ASKED_EARLY,
    GIVEN_WAS_TAKEN,
    SWAPPED_IS_GONE
  };
  Failure(Kind kind, at::IntArrayRef size);

  Kind kind;
};

class Transfer;

// Whether the values of a tensor are there for the streams that regions run on. A region's input may come from a stream for
// which only code inside of the region waits: the first operator that reads it shows that this is done. Of an opaque
// region, which may read it past operators, the end of its forward is taken to show the same.
enum class Ready : uint8_t { UNREAD, ASSUMED, READ };

// A tensor whose first `rows` of dimension 0 have a copy on the host.
struct Swapped {
  Swapped(std::shared_ptr<Transfer> transfer, const at::Tensor& tensor, int64_t rows);
  ~Swapped();
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

  bool whole() const {
    return rows == geometry.size[0];
  }
  // On the host alone; not where a backward that kept no graph was done with a tensor that had no copy.
  bool is_away() const {
    return !tensor.defined() && slot.has_value();
  }
  at::Tensor device_rows() const;

  std::shared_ptr<Transfer> transfer;
  int64_t order = 0; // of its copy out among all copies out
  at::Tensor tensor; // the device memory, undefined while away; dense, covers its storage from offset 0
  Geometry geometry;
  int64_t nbytes, rows;
  std::optional<Slot> slot; // none until its copy out starts
  std::optional<Slot> promised; // while it is `UNREAD`: where its copy out is to go
  Ready ready = Ready::READ;
  bool resident = true; // the original or its copy on the device, with every row valid; later `[0, rows)` are prefetched
  bool mutated = false; // overwritten in place after it was captured: only a recompute pass can replay that
  EventRef offloaded, prefetched; // that its stream has not waited for yet
  uint32_t version;
  StreamRef stream; // that made it, and that its device memory belongs to
  int64_t uses = 0, uses_left = 0; // reads in one backward pass
  int64_t frame = 0; // number of the frame that needs it back first: it comes into that one's rounding buffer
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store)
      : copies(std::move(streams), std::move(store)), streams_(copies.streams()) {}

  // Starts copying rows `[0, rows)` of a dense device tensor out; null where there is no room for them. `later`: only
  // when its device memory is to be released, which may never be.
  // Of one that is `unread` it starts with `note_read` at the earliest.
  std::shared_ptr<Swapped> offload(const at::Tensor& tensor, int64_t rows, bool later, bool unread = false);

  // An operator reads the tensor on the current stream, which has waited for what made it.
  void note_read(Swapped& swapped, Ready ready = Ready::READ);

  // Releases the device memory of resident tensors, once the last of their copies out is done. Throws
  // `SWAPPED_WAS_WRITTEN` where the copy out may have read either value.
  void release(std::vector<std::shared_ptr<Swapped>> group);

  // An operator is about to write to the captured tensor in place: finishes the copy out, and forgets the device memory;
  // where no copy out has started, the tensor goes on in memory of its own.
  void before_write(Swapped& swapped);

  // Starts copying the host rows into device memory of the full size, if the tensor is away: into a rounding buffer, or
  // where none has room for it, new memory. Throws `DETACHED`.
  void prefetch(Swapped& swapped);

  // Has so many rounding buffers of `nbytes` each from now on, none where that is 0. False: the device has no room, and
  // there are none. What is in earlier ones stays there.
  bool reserve(size_t count, int64_t nbytes);

  // The rounding buffers, where the tensor's stream is theirs; else null, and it is prefetched into new memory.
  const RoundingBuffers* buffers_of(const Swapped& swapped) const;

  // The device tensor, and how many of its first rows its stream and the current one may read from now on.
  std::pair<at::Tensor, int64_t> acquire(Swapped& swapped);

  // The current stream is about to read a tensor whose memory belongs to `owner`: where that is another stream, it waits for
  // the owner, and the memory is reused only after the read.
  void order_use(const at::Tensor& tensor, const StreamRef& owner);

  // The device memory has had its last use in this backward pass; its host rows stay for another. Where there are none,
  // the tensor is gone: no graph needs it any more.
  void drop(const std::shared_ptr<Swapped>& swapped);

  void close() {
    copies.close();
    discard_buffers();
  }

  Streams& streams() {
    return streams_;
  }

  // Of all rounding buffers.
  int64_t buffer_bytes() const {
    return rounding_ ? rounding_->nbytes() : 0;
  }

  Copies copies; // `drain` gives back what dead tensors held
  int64_t prefetched_bytes = 0; // of the device: prefetched tensors that were not dropped yet
  int64_t resident_bytes = 0; // of the device: captured tensors that were not released yet
  int64_t offloads = 0;
  int64_t allocations = 0; // of device memory, but for rounding buffers
  int64_t buffer_misses = 0; // copies in that no rounding buffer had room for, where there were some

 private:
  void discard_buffers();
  void send(Swapped& swapped, Slot slot);
  void send_late(Swapped& swapped);
  void copy_on_device(Swapped& swapped);
  void leave(Swapped& swapped);
  at::Tensor memory_for(const Swapped& swapped);
  static void check_version(const Swapped& swapped);

  Streams& streams_;
  std::vector<StreamRef> readers_; // that read tensors of another stream
  std::unique_ptr<RoundingBuffers> rounding_;
};

// Whether the running backward is to leave its graph alive; true outside of one.
bool keeps_graph();

// Whether a tensor covers its storage densely, so that its rows can travel as they lie in memory.
bool is_dense(const at::Tensor& tensor);

// The same memory and version counter, without the graph.
at::Tensor alias_of(const at::Tensor& tensor);

} // namespace memplug
