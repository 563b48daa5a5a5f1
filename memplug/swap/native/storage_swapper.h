// Swaps whole storages to the host between two uses (Chameleon, section 6.2).
//
//     resident ──offload()──► leaving ──release()──► away ──prefetch()──► returning ──restore()──► resident
//        ▲                       │                     │                      │
//        └── an early use, or a writable pointer ──────┴──────────────────────┘
//
// The storage itself changes: while it is away, it points to pinned host memory, which the device can read (unified
// addressing). So every view, alias and version counter of every graph stays valid. Unobserved code (Triton,
// extensions) reads the right values, slowly. If a storage dies while it is away, the deleter of its pointer frees the
// host memory. Before torch hands out a writable pointer to a storage, it calls memplug
// (`StorageImpl::set_materializer`), and memplug restores the storage. So a wrong plan neither loses a value nor lets
// code read a stale one.
//
// If a request for memory has failed, storages leave at once (`leave_now`). A recording does not show that they left,
// so a plan is made for the step as it would be with enough memory.
//
// copies.h makes the copies, and has the rules that order streams. A storage's device memory belongs to the stream that
// was current when its copy out began; while another stream is current, the storage is neither released nor prefetched.
// Each stream that operators run on waits for returned storages before its next operator (`order_use`). Released memory
// is used again only after the work that all these streams had queued before the release.
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

// Counts since the swapper was made.
struct SwapCounters {
  int64_t offloads = 0, offloaded_bytes = 0; // copies out that were started
  int64_t releases = 0, released_bytes = 0;
  int64_t prefetches = 0, prefetched_bytes = 0; // copies in that were started
  int64_t cancelled = 0; // offloads of storages that were used again before they were released
  int64_t demanded = 0; // storages that were used before the list had restored them
  int64_t refused = 0; // copies that failed: the host had no room for a copy out, or the device for a copy in
  int64_t passive = 0, passive_bytes = 0; // storages that left because a request failed; not in the counts above
};

// Unlocks a mutex that was locked before a fork. In the child, the mutex still names the parent's thread as its owner,
// so it is made anew.
inline void unlock(std::recursive_mutex& mutex, bool in_child) {
  if (in_child) {
    new (&mutex) std::recursive_mutex();
  } else {
    mutex.unlock();
  }
}

// Returns the mutex that all swappers of the process share: before a write to a storage, torch does not say which
// swapper has the storage. The mutex is recursive, since freeing memory may free other memory.
std::recursive_mutex& swap_mutex();

class StorageSwapper {
 public:
  // `slab`: pinned host memory, 1-D uint8, with room for all storages that a list has away at the same time; may be
  // undefined. `passive_bytes`: further host memory for storages that leave because a request failed.
  StorageSwapper(std::shared_ptr<Streams> streams, at::Tensor slab, int64_t passive_bytes);
  ~StorageSwapper();
  StorageSwapper(const StorageSwapper&) = delete;
  StorageSwapper& operator=(const StorageSwapper&) = delete;

  // Returns whether this torch has `set_materializer`, without which no storage can leave.
  static bool is_possible();

  // Starts a storage's copy out; `key` names the storage until it is back. Returns false if the storage has to stay,
  // for example because the host has no room or torch's allocator did not make its memory.
  bool offload(const c10::Storage& storage, int64_t key);

  // Frees the storage's device memory. First makes its stream, the current one, wait for the copy out.
  void release(int64_t key);

  // Releases all leaving storages whose memory belongs to the current stream; returns the bytes freed.
  int64_t release_leaving();

  // Offloads a storage that no list names, and releases its device memory at once; the storage returns when an operator
  // uses it. Returns the bytes freed for later work of the current stream; 0: the storage stays.
  int64_t leave_now(const c10::Storage& storage);

  // Undoes the latest return of a storage whose memory belongs to the current stream; the storage stays on the host.
  // Returns the bytes freed for later work of this stream; 0: there is no such return.
  int64_t turn_back();

  // Starts the copy in of the storage with that key.
  void prefetch(int64_t key);

  // Restores the storage, in whatever state it is, for use by the current stream.
  void restore(int64_t key);

  // Called before an operator runs on the current stream: makes the stream wait for the copies in of returned storages.
  // Returns whether `use` must be called for the operator's storages.
  bool order_use();

  // Returns whether no storage is leaving, away or returning.
  bool is_empty() const {
    return all_.empty();
  }

  // Called for each storage that an operator uses, if `order_use` returned true: restores the storage if it is not
  // back.
  void use(const c10::StorageImpl* storage);

  // Restores all storages, and makes every stream that operators have run on wait for them. Returns false if the device
  // has no room for some; these stay on the host, where the device can read them.
  bool restore_all();

  // Returns the number of the stream that operators run on now.
  int64_t current_stream() {
    return streams_.current_number();
  }

  // Returns whether the storage is leaving, away or returning.
  bool has(const c10::StorageImpl* storage) const;

  // Starts to measure how long the program waits for copies (if `waits`), and when operators begin (if `operators`, see
  // `mark_operator`). Stops measuring if both are false. `waited_s` and `operators_s` return the results in seconds
  // (see `StepTimes::operators_s`); they return empty while the device still works on the step.
  void measure(bool waits, bool operators);
  std::optional<double> waited_s();
  std::optional<std::vector<double>> operators_s();

  // Called when an operator begins: an outermost one of the program, or any outside of the program.
  void mark_operator(bool of_program) {
    copies_.times.mark_operator(streams_, of_program);
  }
  void end_step() {
    copies_.times.end_step(streams_);
  }

  // Returns the bytes of host memory in use.
  int64_t host_bytes();
  SwapCounters counters();

 private:
  enum class OffloadState : uint8_t { LEAVING, AWAY, RETURNING };
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
  Copies copies_; // its users: the streams that operators run on, or that were current when a storage left
  Streams& streams_;
  std::vector<int64_t> waited_; // by user: the user has waited for all returns up to this number
  int64_t newest_stream_ = 0; // number of the last operator's stream
  size_t newest_user_ = 0; // index of that stream among the users; meaningless while there are no users
  int64_t arrived_ = 0; // number of the latest return that has arrived
  EventRef last_arrival_; // event at the end of that return
  // storages that have returned in this step; may dangle: only compared
  ska::flat_hash_set<const c10::StorageImpl*> returned_;
  std::vector<std::unique_ptr<Absent>> all_;
  ska::flat_hash_map<int64_t, Absent*> of_key_;
  int64_t passive_room_; // bytes of host memory that may still be added for passive storages
  int64_t returns_ = 0; // number of returns begun so far
  SwapCounters counters_;
};

} // namespace memplug
