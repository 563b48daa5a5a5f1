// A step that repeats, told by what it asks for: of its operators only those around a last use have to be seen.
//
// To see an operator costs the host up to a quarter of the time that a small one takes. So while all of them are seen (finder.h),
// it is learnt which requests for memory a step makes, in order, and between which of them each target is used last and has its
// turns. Once some steps in a row were alike, the next one is followed by its requests, for as long as each is the learnt one.
//
// The price: what a followed step has made is not known where it departs after all, and cannot leave if memory is short then.
// So after each departure twice as many steps have to be alike.
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

// Counts of requests are of those that the step has made before.
class RepeatedStep {
 public:
  // A step begins, with so many targets and turns.
  void begin(size_t targets, size_t turns);

  bool is_followed() const {
    return is_followed_;
  }

  // This step is no example of the next one.
  void spoil() {
    is_spoilt_ = true;
  }

  // And it is less likely than was thought that there will be one.
  void distrust() {
    if (!std::exchange(is_spoilt_, true)) {
      needed_ = std::min(2 * needed_, kMany);
    }
  }

  // It is over, and every target was found, or not.
  void end(bool is_whole);

  // -- all operators are seen --

  // A request is made while that outermost operator runs.
  void learn_request(int64_t nbytes, const void* stream, int32_t place);

  // An outermost operator begins, on a stream.
  void learn_operator(int64_t stream);

  // The operator that runs is the last one to use a target's storage; it is over.
  void learn_last_use(int32_t target, const c10::Storage& storage);
  void learn_end_of_last_use(int32_t target);

  void learn_turn(int32_t turn) {
    now_.turns[turn] = made();
  }

  // By turn, how many requests the step that is followed makes before it.
  const std::vector<int64_t>& turns() const {
    return former_.turns;
  }

  // -- followed --

  // Something is to happen at a request: see `pass`.
  void expect(int64_t request);

  // A request is made, which needs no lock: whether it is the learnt one, and nothing is to happen at it. What threads that
  // train read here changes only at the end of a step that is not followed.
  bool pass(int64_t nbytes, const void* stream) {
    int64_t number = next_.load(std::memory_order_acquire);
    return number < static_cast<int64_t>(quiet_.size()) && quiet_[number] && is_learnt(number, nbytes, stream) &&
        next_.compare_exchange_strong(number, number + 1, std::memory_order_acq_rel);
  }

  // A request is made: whether it is the learnt one, and every last use was seen that was to be by now.
  bool follow(int64_t nbytes, const void* stream);

  // The number of the last request, and the outermost operator that made it; -1: there was none.
  int64_t last_request() const {
    return next_ - 1;
  }
  int32_t place() const {
    return next_ == 0 ? -1 : former_.requests[next_ - 1].place;
  }

  // Targets that an operator about now uses last.
  const std::vector<int32_t>& open() const {
    return open_;
  }

  bool is_of(int32_t target, const c10::Storage& storage) const;
  void close(int32_t target, const c10::Storage& storage);

  // From here on all operators are seen.
  void depart();

  // -- both --

  // A request of the step was served, or one that is no part of it.
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
  // Which storage a target's is: the one whose memory this request of the step made, that of an earlier target, or one that was
  // there before.
  struct Origin {
    int64_t request = -1;
    int32_t target = -1;
    const void* storage = nullptr;
    bool operator==(const Origin&) const = default;
  };
  // The operator that uses it last begins after `opens` requests, and ends after `closes`.
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
  int alike_ = 0, needed_ = kFew; // steps that were as the one before, in a row; so many, and the next one is followed
  int64_t opens_ = 0;
  std::optional<int64_t> stream_; // of the operators
  std::vector<WeakStorage> storages_, former_storages_; // by target; while it is held, its address is no other's
  ska::flat_hash_map<const void*, int32_t> target_of_; // by storage, the last one
  ska::flat_hash_map<const void*, int64_t> requests_; // by memory, the last one; in a step that is followed those of targets
  ska::flat_hash_map<int64_t, int32_t> wanted_; // requests that make a target's memory
  std::vector<int32_t> by_opening_, open_;
  std::vector<uint8_t> quiet_; // by request: nothing is to happen at it
  std::atomic<int64_t> next_{0};
  size_t next_opening_ = 0;
};

} // namespace memplug
