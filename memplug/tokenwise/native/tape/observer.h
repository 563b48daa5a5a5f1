// The observer of a region's forward, on the thread that runs it.
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
// An operator that only calls others is looked through: the operators that it calls are noted instead. Such operators
// are composite, or are about to be cast by autocast, or got tensors of a subclass. Every other operator is a leaf.
// Operators inside of a leaf and operators on fake tensors are not noted.
class Observer {
 public:
  explicit Observer(Forward& forward);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // Throws the first error that occurred while an operator was noted. Until then the observer keeps it, since torch
  // lets no error out of a callback.
  void rethrow();

  // Takes note that code took a tensor's address. Writes through the address are invisible to the observer.
  static void address_taken(const at::Tensor& tensor);

  // Takes note that Python reads a tensor's values without an operator.
  static void read(const at::Tensor& tensor);

  // Returns whether this thread runs an observed forward, and observing is not paused.
  static bool is_active();

  // Returns whether an operator that began now on this thread would be noted. False inside of a leaf.
  static bool is_noting();

  // Stops observing in the child of a fork, unless the forking thread runs a forward. Other threads' forwards do not
  // exist in the child.
  static void end_in_child();

 private:
  enum class What : uint8_t { IGNORED, THROUGH, LEAF, FAKE };
  struct Running {
    What what;
    bool mutates;
    size_t before; // number of operators noted before it began
    std::optional<Modes::Inside> inside = {}; // set for a call while a leaf's modes run
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
  const Operator* leaf_ = nullptr; // the running leaf, if it may launch collectives that its name does not show
  Modes modes_; // around the leaf
  int launched_ = 0, pending_ = 0; // number of collectives inside of the leaf: all, and those that none waited for
  bool inside_ = false; // inside of a leaf, of an operator on fake tensors, or of a listener
  std::exception_ptr failure_;
};

} // namespace memplug
