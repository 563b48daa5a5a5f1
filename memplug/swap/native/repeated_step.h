// Follows a step that repeats earlier ones by its requests for memory.
//
// A target is a tensor of the swap list; its turns are its release, prefetch and restore. A step is followed if memplug
// sees only the operators around each target's last use. This saves time: to see an operator costs the host up to a
// quarter of a small operator's time.
//
// In a step whose operators are all seen (finder.h), this class learns the requests in order. It also learns between
// which requests each target has its last use and its turns. After enough alike steps in a row, the next step is
// followed: as long as each request equals the learnt one, the requests alone show how far the step has come.
//
// A followed step departs when a request differs from the learnt one. memplug then does not know which tensors the step
// has used so far, and cannot offload them if memory is short in the rest of the step. So each departure doubles the
// number of alike steps that are needed before a step is followed.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace memplug {

// Requests are numbered from the beginning of the step.
class RepeatedStep {
 public:
  // Begins a step. The arguments are how many targets and turns the list has.
  void begin(size_t targets, size_t turns);

  bool is_followed() const {
    return is_followed_;
  }

  // Spoils this step: nothing is learnt from it, and the count of alike steps starts again.
  void spoil() {
    is_spoilt_ = true;
  }

  // Spoils this step, and doubles the number of alike steps that are needed before a step is followed.
  void distrust() {
    if (!std::exchange(is_spoilt_, true)) {
      needed_ = std::min(2 * needed_, kMany);
    }
  }

  // Ends the step. `is_whole`: whether every target was found in it.
  void end(bool is_whole);

  // -- while all operators are seen --

  // Learns a request that is made while the outermost operator at `place` runs.
  void learn_request(int64_t nbytes, const void* stream, int32_t place);

  // Learns that an outermost operator begins, and on which stream.
  void learn_operator(int64_t stream);

  // `learn_last_use` learns that the running operator is the last to use a target's storage before the storage leaves.
  // `learn_end_of_last_use` learns that this operator has ended.
  void learn_last_use(int32_t target, const c10::Storage& storage);
  void learn_end_of_last_use(int32_t target);

  void learn_turn(int32_t turn) {
    now_.turns[turn] = made();
  }

  // Returns for each turn how many requests the learnt step made before it; -1: the learnt step did not have this turn.
  const std::vector<int64_t>& turns() const {
    return former_.turns;
  }

  // -- while the step is followed --

  // Notes that an action is due at a request, so that `pass` refuses the request.
  void expect(int64_t request);

  // Called at each request, without a lock. If the request is the learnt one and no action is due at it, counts the
  // request, and returns true. All other data that `pass` reads changes only between steps.
  bool pass(int64_t nbytes, const void* stream) {
    int64_t number = next_.load(std::memory_order_acquire);
    return number < static_cast<int64_t>(quiet_.size()) && quiet_[number] && is_learnt(number, nbytes, stream) &&
        next_.compare_exchange_strong(number, number + 1, std::memory_order_acq_rel);
  }

  // Called at a request that `pass` has refused. Returns false if the request is not the learnt one, or if memplug has
  // not seen a last use that should have ended before this request. Otherwise counts the request, and returns true.
  bool follow(int64_t nbytes, const void* stream);

  // Return the number of the step's last request, and the place of the outermost operator that made it; -1: no request
  // yet.
  int64_t last_request() const {
    return next_ - 1;
  }
  int32_t place() const {
    return next_ == 0 ? -1 : former_.requests[next_ - 1].place;
  }

  // Returns the open targets: those whose last use may happen now.
  const std::vector<int32_t>& open() const {
    return open_;
  }

  // `is_of` returns whether the storage is that of an open target; `close` notes that memplug has seen this target's
  // last use.
  bool is_of(int32_t target, const c10::Storage& storage) const;
  void close(int32_t target, const c10::Storage& storage);

  // Stops following: from here on all operators are seen.
  void depart();

  // -- at any time --

  // `served` notes the memory that served the step's last request; `served_other` notes memory that served a request
  // outside of the step.
  void served(const void* memory);
  void served_other(const void* memory) {
    requests_.erase(memory);
  }

 private:
  struct Request {
    int64_t nbytes;
    const void* stream;
    int32_t place;
    bool operator==(const Request&) const = default;
  };
  // Identifies a target's storage: by the step's request for its memory, by an earlier target with the same storage, or
  // by its address if it existed before the step.
  struct Origin {
    int64_t request = -1;
    int32_t target = -1;
    const void* storage = nullptr;
    bool operator==(const Origin&) const = default;
  };
  // A target's last use: its operator begins after `opens` requests of the step, and ends after `closes` requests.
  struct LastUse {
    Origin origin;
    int64_t opens = -1, closes = -1;
    bool operator==(const LastUse&) const = default;
  };
  struct Step {
    std::vector<Request> requests;
    std::vector<LastUse> last_uses; // by target
    std::vector<int64_t> turns;
    bool operator==(const Step&) const = default;
  };
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  int64_t made() const {
    return static_cast<int64_t>(now_.requests.size());
  }
  bool is_learnt(int64_t number, int64_t nbytes, const void* stream) const {
    const Request& learnt = former_.requests[number];
    return learnt.nbytes == nbytes && learnt.stream == stream;
  }
  void open_until(int64_t requests);

  Step now_, former_;
  static constexpr int kFew = 3, kMany = 1 << 10;

  bool is_followed_ = false, is_spoilt_ = false;
  // number of alike steps in a row, and the number that is needed to follow the next step
  int alike_ = 0, needed_ = kFew;
  int64_t opens_ = 0;
  std::optional<int64_t> stream_; // stream of the step's last operator
  // by target: its storage; a weak reference keeps the address from being reused
  std::vector<WeakStorage> storages_, former_storages_;
  ska::flat_hash_map<const void*, int32_t> target_of_; // by storage: its latest target
  // by address: number of the last request that it served; in a followed step, only of requests for targets' memory
  ska::flat_hash_map<const void*, int64_t> requests_;
  ska::flat_hash_map<int64_t, int32_t> wanted_; // by request: the target whose memory it makes
  std::vector<int32_t> by_opening_, open_;
  std::vector<uint8_t> quiet_; // by request: 1 if no action is due at it
  std::atomic<int64_t> next_{0};
  size_t next_opening_ = 0;
};

} // namespace memplug
