// Calls memplug's watchers when operators begin and end, on any thread. Watchers with the same `Need` share one torch
// callback.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "operator_names.h"
#include "torch_private.h"

namespace memplug {

// The facts about operators that a watcher needs: beginnings; also ends; also tensors, which cost the most time.
enum class Need : uint8_t { BEGINNINGS, ENDS, TENSORS };

// An operator of the calling thread, at its beginning or its end.
class OperatorCall {
 public:
  static constexpr int32_t UNKNOWN = -2;

  explicit OperatorCall(const at::RecordFunction& function, int32_t number = UNKNOWN)
      : function(function), number_(number) {}

  // Returns the operator's number (operator_names.h), which is looked up once for all watchers.
  int32_t number() {
    return number_ != UNKNOWN ? number_ : number_ = number_of(function);
  }
  int32_t known_number() const {
    return number_;
  }

  const at::RecordFunction& function;

 private:
  int32_t number_;
};

// A watcher must never be destroyed. If a watcher throws, torch logs it, and the other watchers are still notified.
struct Watcher {
  Need need;
  // returns whether to call `end` for this operator; `end` is called even if the watcher has been removed meanwhile
  bool (*begin)(OperatorCall& call);
  void (*end)(OperatorCall& call) = nullptr;
};

// Positions of watchers; each position holds one watcher. Watchers with the same need are called in this order, at
// beginnings and at ends.
enum Order : size_t { RECORDS, STORAGES, FORWARDS, WATCHERS };

// Sets the watcher at a position, from the next operator on. Null removes it.
void set_watcher(Order order, const Watcher* watcher);

// Removes the watcher at a position in the child of a fork. The child must not take torch's locks, so torch's callback
// stays, without a watcher to notify.
void silence(Order order);

// Keeps a watcher set while at least one instance for its position lives.
class Watching {
 public:
  Watching(Order order, const Watcher& watcher);
  ~Watching();
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  const Order order_;
  int silenced_; // number of calls of `silence` for the position before this instance was made
};

void lock_bus_for_fork();
void unlock_bus_after_fork();

// While an instance lives, no region's forward notes the calling thread's operators.
class Pause {
 public:
  Pause() {
    begin();
  }
  ~Pause() {
    end();
  }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static void begin();
  static void end();
  static int depth(); // returns the number of instances that live on the calling thread
};

} // namespace memplug
