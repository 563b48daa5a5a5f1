// Copies device memory to a store (copy out) and back (copy in), on two copy streams. Events order these copies with
// the streams that operators run on, the users. memplug makes all its copies of rows and of whole tensors through this
// class.
//
// A slot is the space in the store for one copy. Device memory belongs to a stream, its owner. Three rules make every
// reuse of memory safe by the order of events alone (`Wait` in streams.h lists the reasons for waiting):
//   1. Device memory is released, or written in place, only after its owner has waited for the copy out that reads it.
//   2. A copy in starts only after the work queued on the owner so far. So earlier uses of the memory that it writes
//      are done. By rule 1, the copy out that filled its slot is done too.
//   3. A slot returns to its store only after the owner has waited for every copy in that reads the slot. A later copy
//      out, which may fill the slot again, starts only after the work queued on all users so far.
//
// An instance is guarded by a lock of the technique that made it: Python's lock (regions), or `swap_mutex` (the swap
// list).
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
  // Memory whose data is no longer needed, but which a copy may still read or write. `free()` releases the device
  // memory.
  struct Abandoned {
    StreamRef owner;
    EventRef prefetched, offloaded; // events of copies that the owner has not waited for yet
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

  // Reserves space in the store. If the store has none, counts the refusal and returns empty.
  std::optional<Slot> take(int64_t nbytes);
  void give(const Slot& slot) {
    store_->give(slot);
  }

  // Starts a copy out after the work queued so far on all users. `owner` is the stream that the rows belong to. Returns
  // an event that completes with the copy.
  EventRef offload(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Starts a copy in after the work queued so far on `owner`, the stream that the rows belong to. Returns an event that
  // completes with the copy.
  EventRef prefetch(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Makes all later copies in wait for the work queued so far on this stream, too.
  void prefetch_after(const StreamRef& stream);

  // Makes a stream of operators wait for a copy.
  void wait(const StreamRef& stream, const EventRef& event, Wait why) {
    times.around(*streams_, stream, [&] { streams_->wait(stream, event, why); });
  }

  // Makes the owner wait for a copy, and also the current stream if that is another one.
  void wait_on_its_streams(const StreamRef& owner, const EventRef& event, Wait why);

  // `abandon` queues memory whose data is no longer needed, but which a copy may still use. `drain` makes the owner of
  // such memory wait for that copy, and then releases the memory.
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

  StepTimes times; // times of waits; on the CPU, where nothing waits, times of copies
  int64_t offloaded_bytes = 0, prefetched_bytes = 0; // of all copies started so far
  int64_t refused = 0, refused_bytes = 0; // requests for which the store had no space

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
