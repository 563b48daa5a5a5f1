// Copies of device memory to a store beside it and back: two copy streams, and events that order them with the streams that
// operators run on. All that memplug moves, by rows or whole, moves through this.
//
// Device memory belongs to a stream, its owner. Three rules make every reuse of memory safe, in the order of events alone
// (`Wait` names each one):
//   1. device memory is released, or written in place, only after its owner has waited for the copy out that reads it;
//   2. a copy in starts only after the present of the owner: earlier users of the new device memory are done, and so, by
//      rule 1, is the copy out that filled the slot;
//   3. a slot goes back to its store only after the owner has waited for every copy in that reads it, and a copy out starts
//      only after the present of all `users()`.
//
// Guarded by its owner's lock: Python's, or `swap_mutex`.
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
  // What a copy may still use although nobody will ask for it. `free()` releases the device memory.
  struct Abandoned {
    StreamRef owner;
    EventRef prefetched, offloaded; // that the owner has not waited for yet
    std::optional<Slot> slot;
    std::function<void()> free;
  };

  Copies(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store);
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  Streams& streams() {
    return *streams_;
  }

  // Streams that operators have run on. `note_user`: one more, if it is not known yet; returns its number.
  const std::vector<StreamRef>& users() const {
    return users_;
  }
  size_t note_user(const StreamRef& stream) {
    return streams_->number_among(users_, stream);
  }

  // Reserves room in the store; empty: there is none, which counts.
  std::optional<Slot> take(int64_t nbytes);
  void give(const Slot& slot) {
    store_->give(slot);
  }

  // Starts the copy out of rows that belong to `owner`, after the present of all users. Returns its end.
  EventRef offload(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Starts the copy in to rows that belong to `owner`, after its present. Returns its end.
  EventRef prefetch(const at::Tensor& rows, const Slot& slot, const StreamRef& owner);

  // Copies in from now on start after that stream's present too.
  void prefetch_after(const StreamRef& stream);

  // A stream of operators waits for a copy.
  void wait(const StreamRef& stream, const EventRef& event, Wait why) {
    times.around(*streams_, stream, [&] { streams_->wait(stream, event, why); });
  }

  // So do the owner, and the stream that operators run on now where that is another.
  void wait_on_its_streams(const StreamRef& owner, const EventRef& event, Wait why);

  // To be given back by `drain`, once the owner has waited for the copy in that writes to it, or for the copy out that reads
  // it: what that writes is never read, but memory may be given back to the system while it reads.
  void abandon(Abandoned abandoned) {
    abandoned_.push_back(std::move(abandoned));
  }
  void drain();

  // The store is about to go: no slot is given back any more.
  void close() {
    drain();
    closed_ = true;
  }
  bool is_closed() const {
    return closed_;
  }

  StepTimes times; // of waits, and on the CPU of the copies themselves, while that is asked for
  int64_t offloaded_bytes = 0, prefetched_bytes = 0; // of copies that were started
  int64_t refused = 0, refused_bytes = 0; // the store had no room

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
