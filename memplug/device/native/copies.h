// Copies device memory to a store (copy out) and back (copy in), on two copy streams. Events order the copies with the
// streams that operators run on. memplug makes all its copies through this class, of rows and of whole tensors.
//
// The store's space for a copy is a slot. Device memory belongs to a stream, its owner. Three rules make every reuse of
// memory safe by the order of events alone (each `Wait` in streams.h names the reason of one wait):
//   1. Device memory is released, or written in place, only after its owner has waited for the copy out that reads it.
//   2. A copy in starts only after the work queued on the owner so far. So earlier uses of the new device memory are
//      done, and by rule 1 also the copy out that filled the slot.
//   3. A slot returns to its store only after the owner has waited for every copy in that reads it. A copy out, which
//      may fill that slot, starts only after the work queued so far on all `users()`.
//
// The lock of the technique that made an instance guards it: Python's lock (regions), or `swap_mutex` (the swap list).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "row_store.h"
#include "step_times.h"
#include "streams.h"

namespace memplug {

class Copies {
 public:
  // Memory whose data is no longer needed, but which a copy may still use. `free()` releases the device memory.
  struct Abandoned {
    StreamRef owner;
    EventRef prefetched, offloaded; // copies that the owner has not waited for yet
    std::optional<Slot> slot;
    std::function<void()> free;
  };

  Copies(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store);
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  Streams& streams() {
    return *streams_;
  }

  // Returns the streams that operators have run on. `note_user` adds a stream if it is new, and returns its index.
  const std::vector<StreamRef>& users() const {
    return users_;
  }
  size_t note_user(const StreamRef& stream) {
    return streams_->number_among(users_, stream);
  }

  // Reserves space in the store. If there is none, counts the refusal and returns empty.
  std::optional<Slot> take(int64_t nbytes);
  void give(const Slot& slot) {
    store_->give(slot);
  }

  // Starts a copy out, after the work queued so far on all users; the rows belong to the stream `owner`. Returns an
  // event that completes with the copy.
  EventRef offload(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Starts a copy in, after the work queued so far on `owner`, the stream that the rows belong to. Returns an event
  // that completes with the copy.
  EventRef prefetch(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Makes each later copy in start after the work queued so far on this stream too.
  void prefetch_after(const StreamRef& stream);

  // Makes a stream of operators wait for a copy.
  void wait(const StreamRef& stream, const EventRef& event, Wait why) {
    times.around(*streams_, stream, [&] { streams_->wait(stream, event, why); });
  }

  // Makes the owner wait for a copy, and also the current stream of operators if that is another.
  void wait_on_its_streams(const StreamRef& owner, const EventRef& event, Wait why);

  // Hands over to `drain` memory whose data is no longer needed. A copy may still use the memory, so `drain` makes the
  // owner wait for that copy before it releases the memory.
  void abandon(Abandoned abandoned) {
    abandoned_.push_back(std::move(abandoned));
  }
  void drain();

  // Called before the store is destroyed: from then on no slot returns to the store.
  void close() {
    drain();
    closed_ = true;
  }
  bool is_closed() const {
    return closed_;
  }

  StepTimes times; // measured waits; on the CPU, where nothing waits, measured copies
  int64_t offloaded_bytes = 0, prefetched_bytes = 0; // sums over all copies started so far
  int64_t refused = 0, refused_bytes = 0; // requests that the store had no space for

 private:
  template <typename Act>
  void copy(const StreamRef& owner, const Act& act) {
    streams_->is_immediate() ? times.around(*streams_, owner, act) : act();
  }

  std::shared_ptr<Streams> streams_;
  std::shared_ptr<RowStore> store_;
  StreamRef offload_stream_, prefetch_stream_;
  std::vector<StreamRef> users_;
  std::deque<Abandoned> abandoned_;
  bool closed_ = false;
};

} // namespace memplug
