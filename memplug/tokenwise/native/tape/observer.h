// The observer: sees the operators of a region's forward on the thread that runs it.
#pragma once

#include <exception>
#include <optional>
#include <vector>

#include "bus.h"
#include "forward.h"
#include "modes.h"
#include "torch_private.h"

namespace memplug {

// Reports this thread's operators to a forward until destroyed.
//
// If an operator only calls other operators, the forward notes these instead. Such an operator is composite, or
// autocast will cast its arguments, or some of its arguments are of a tensor subclass. Every other operator is a leaf.
// The forward notes no operators inside of a leaf, and none on fake tensors.
class Observer {
 public:
  explicit Observer(Forward& forward);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // Throws the first error that occurred while the forward noted an operator. The observer has kept the error, since
  // torch lets none out of a callback.
  void rethrow();

  // Notes that code took a tensor's address. Writes through the address are invisible to the observer.
  static void address_taken(const at::Tensor& tensor);

  // Notes that Python reads a tensor's values without an operator.
  static void read(const at::Tensor& tensor);

  // Returns whether this thread runs an observed forward, and observing is not paused.
  static bool is_active();

  // Returns whether the forward would note an operator that began now on this thread. False inside of a leaf.
  static bool is_noting();

  // Stops observing in the child of a fork, unless the forking thread runs a forward: the forwards of other threads do
  // not exist in the child.
  static void end_in_child();

 private:
  // How the forward handles an operator. THROUGH: it notes the operators inside. LEAF: it notes the operator itself.
  // FAKE: it notes neither, since the operator runs on fake tensors.
  enum class What : uint8_t { IGNORED, THROUGH, LEAF, FAKE };
  struct Running {
    What what;
    bool mutates;
    size_t before; // number of operators that the forward had noted before this one
    // set only for an operator that a dispatch mode calls while it handles a leaf
    std::optional<Modes::Inside> inside = {};
  };

  static bool begin(OperatorCall& call);
  static void end(OperatorCall& call);
  static constexpr Watcher watcher{Need::TENSORS, begin, end};
  Running begin(const at::RecordFunction& function, const Operator& op);
  void look_inside(const at::RecordFunction& function);
  void note_exchanges(c10::ArrayRef<c10::IValue> results);
  void fail();

  Forward& forward_;
  Observer* outer_;
  const Watching watching_{FORWARDS, watcher};
  std::vector<Running> running_;
  const Operator* leaf_ = nullptr; // the running leaf, if it may launch collectives although its name does not say so
  Modes modes_; // dispatch modes around the running leaf
  // number of collectives that the leaf has launched: all, and those that it has not waited for
  int launched_ = 0, pending_ = 0;
  bool inside_ = false; // a leaf, an operator on fake tensors, or the listener is running
  std::exception_ptr failure_;
};

} // namespace memplug
