// Storages that are away from the device, whole, between two uses (Chameleon, section 6.2).
//
//     resident ──offload()──► leaving ──release()──► away ──prefetch()──► returning ──restore()──► resident
//        ▲                       │                     │                      │
//        └── a use of it, or a pointer to write to ────┴──────────────────────┘
//
// The storage itself changes: while it is away, its pointer is that of its pinned host memory, which the device can read
// (unified addressing). So every view, alias and version counter of every graph goes along; code that no operator shows
// (Triton, extensions) reads the right values, slowly; and a storage that dies gives its host memory back by its deleter.
// Whatever asks a storage for a pointer that it may write to is seen by torch (`StorageImpl::set_materializer`): before it
// gets one, the storage is restored. So whatever a plan says, no value is lost, and none is read that is not the last.
//
// Where a request for memory has failed, one leaves at once (`leave_now`): to a recording it stays, so that a plan is made for
// the step as it would be with memory enough.
//
// Copies are those of copies.h, and so are the rules by which streams are ordered. Device memory belongs to the stream that the
// storage left on; where another one is current, nothing is released or prefetched. Each stream that operators run on waits for
// what has returned before its next operator (`order_use`), and memory is freed only after all of them.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "copies.h"
#include "host_rows.h"
#include "torch_private.h"

namespace memplug {

// Counts and bytes since the swapper was made.
struct SwapCounters {
  int64_t offloads = 0, offloaded_bytes = 0; // copies out that were started
  int64_t releases = 0, released_bytes = 0;
  int64_t prefetches = 0, prefetched_bytes = 0; // copies in that were started
  int64_t cancelled = 0; // storages that were used again before they were released
  int64_t demanded = 0; // storages that came back before their plan had them back
  int64_t refused = 0; // the host had no room, or the device none for the way back
  int64_t passive = 0, passive_bytes = 0; // that left because a request failed: none of the above
};

// A lock that was taken before a fork. In the child its owner is another thread, which cannot give it back.
inline void unlock(std::recursive_mutex& mutex, bool in_child) {
  if (in_child) {
    new (&mutex) std::recursive_mutex();
  } else {
    mutex.unlock();
  }
}

// Of all swappers of the process, since a storage that is written to does not know whose it is. Recursive: memory that is
// freed may free other memory.
std::recursive_mutex& swap_mutex();

class StorageSwapper {
 public:
  // `slab`: pinned host memory, 1-D uint8, for all that a plan has away at a time; may be undefined. `passive_bytes`: of the
  // host, that storages may take besides which leave because memory is short.
  StorageSwapper(std::shared_ptr<Streams> streams, at::Tensor slab, int64_t passive_bytes);
  ~StorageSwapper();
  StorageSwapper(const StorageSwapper&) = delete;
  StorageSwapper& operator=(const StorageSwapper&) = delete;

  // Whether torch says who asks for a pointer to write to.
  static bool is_possible();

  // Starts the copy out of a storage of torch's own allocator that is not on its way already; `key` names it until it is
  // back. False: it stays.
  bool offload(const c10::Storage& storage, int64_t key);

  // Its device memory is free for what the current stream does next, which waits for the copy out.
  void release(int64_t key);

  // The same for all that are on their way out: how many bytes.
  int64_t release_leaving();

  // It leaves at once, for no plan, until it is used. Bytes that are free for what the current stream does next, 0: it stays.
  int64_t leave_now(const c10::Storage& storage);

  // The one whose return began last stays on the host. Bytes that are free for what the current stream does next.
  int64_t turn_back();

  // Starts the copy in.
  void prefetch(int64_t key);

  // From here on it is on the device for the current stream, wherever it was.
  void restore(int64_t key);

  // An operator is about to run on the current stream, which waits for all that has returned. Returns whether `use` is to be
  // told of its storages.
  bool order_use();

  // Nothing is on its way.
  bool is_empty() const {
    return all_.empty();
  }

  // Such an operator uses a storage, which is restored if it is on its way.
  void use(const c10::StorageImpl* storage);

  // All that is away comes back, for every stream that operators have run on. False: the device has no room for some of it, which stays where the device can read it.
  bool restore_all();

  // That operators run on now, by number.
  int64_t current_stream() {
    return streams_.current_number();
  }

  // It is on its way.
  bool has(const c10::StorageImpl* storage) const;

  // How long the program waits for copies is measured from here on, and when operators begin, see `mark_operator`; or no
  // more. What it waited, and see `StepTimes::operators_s`: seconds; none: the device is not done.
  void measure(bool waits, bool operators);
  std::optional<double> waited_s();
  std::optional<std::vector<double>> operators_s();

  // An outermost operator of the program begins, or one that is none of it.
  void mark_operator(bool of_program) {
    copies_.times.mark_operator(streams_, of_program);
  }
  void end_step() {
    copies_.times.end_step(streams_);
  }

  // Of the host, in use.
  int64_t host_bytes();
  SwapCounters counters();

 private:
  enum class State : uint8_t { LEAVING, AWAY, RETURNING };
  struct Absent;
  struct HostMemory;

  static ska::flat_hash_map<const c10::StorageImpl*, Absent*>& absents();
  static void before_write(c10::StorageImpl* storage);
  static void forget(void* host_memory);

  Absent* find(int64_t key) const;
  Absent* start_leaving(const c10::Storage& storage, int64_t key);
  bool add_host_memory(int64_t nbytes);
  bool is_current(const Absent& absent);
  bool start_return(Absent& absent);
  void leave(Absent& absent);
  void arrive(Absent& absent);
  void stay(Absent& absent);
  bool bring_back(Absent& absent);
  size_t user_of(const StreamRef& stream);
  void wait_for_return(size_t user, int64_t began, const EventRef& event);
  std::unique_ptr<Absent> take(Absent& absent);

  const std::shared_ptr<HostRows> pool_;
  Copies copies_; // its users are the streams that operators run on, or storages have left on
  Streams& streams_;
  std::vector<int64_t> waited_; // by user: number of the last return that it has waited for, and so for all before it
  int64_t newest_stream_ = 0; // number of the last operator's
  size_t newest_user_ = 0; // that stream, once there are some
  int64_t arrived_ = 0; // number of the latest return that has arrived
  EventRef last_arrival_; // its end
  ska::flat_hash_set<const c10::StorageImpl*> returned_; // in this step, to other memory; names alone: they may be gone
  std::vector<std::unique_ptr<Absent>> all_;
  ska::flat_hash_map<int64_t, Absent*> of_key_;
  int64_t passive_room_; // bytes of the host that may be added
  int64_t returns_ = 0; // that ever began
  SwapCounters counters_;
};

} // namespace memplug
