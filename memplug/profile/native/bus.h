// Operators as they happen, on any thread, told to watchers: by one callback of torch's for all that need the same.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "operator_names.h"
#include "torch_private.h"

namespace memplug {

// What a watcher needs of operators: that they begin; that they end, too; and their tensors, which cost most of it.
enum class Need : uint8_t { BEGINNINGS, ENDS, TENSORS };

// An operator of the calling thread that begins or has ended.
class Call {
 public:
  static constexpr int32_t UNKNOWN = -2;

  explicit Call(const at::RecordFunction& function, int32_t number = UNKNOWN) : function(function), number_(number) {}

  // Its number (operator_names.h), looked up once for all watchers.
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

// Each one lives for ever. What it throws is logged by torch, and the others are told all the same.
struct Watcher {
  Need need;
  bool (*begin)(Call& call); // whether it is told of the end too, although it may watch no more by then
  void (*end)(Call& call) = nullptr;
};

// Those who need the same are told in this order, of beginnings as of ends.
enum Order : size_t { RECORDS, STORAGES, FORWARDS, WATCHERS };

// Who is told of operators from their next one on, at that place of the order; null: nobody.
void set_watcher(Order order, const Watcher* watcher);

// The same in the child of a fork, which must not ask for locks of torch's: its callback stays, and tells nobody.
void silence(Order order);

// The same for as long as one of them lives.
class Watching {
 public:
  Watching(Order order, const Watcher& watcher);
  ~Watching();
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  const Order order_;
  int silenced_; // how often its place had been when it began
};

void lock_bus_for_fork();
void unlock_bus_after_fork();

// While one lives, operators of the calling thread are no forward's.
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
  static int depth(); // how many live
};

} // namespace memplug
