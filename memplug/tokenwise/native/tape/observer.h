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
// An operator that only calls others (composite, under autocast, with tensors of a subclass) is looked through: the
// operators that it calls are noted instead of it. All others are leaves. Operators inside of a leaf are not noted, nor
// are operators on fake tensors.
class Observer {
 public:
  explicit Observer(Forward& forward);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // Throws the error of a listener, since torch lets none out of a callback.
  void rethrow();

  // Takes note that a tensor's address escaped: writes through it are invisible to the observer.
  static void address_taken(const at::Tensor& tensor);

  // Takes note that Python reads a tensor's values without an operator.
  static void read(const at::Tensor& tensor);

  // Returns whether this thread has an observed forward (`is_active`), and whether an operator that began now would be
  // noted (`is_noting`). Operators inside of a leaf are not noted.
  static bool is_active();
  static bool is_noting();

  // Stops observing in the child of a fork, where other threads' forwards do not exist.
  static void end_in_child();

 private:
  enum class What : uint8_t { IGNORED, THROUGH, LEAF, FAKE };
  struct Running {
    What what;
    bool mutates;
    size_t before; // number of operators begun by then
    std::optional<Modes::Inside> inside = {}; // within an operator that modes are called for
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
  const Operator* leaf_ = nullptr; // the running leaf, if the operators that it calls say more than its name
  Modes modes_; // called for the leaf
  int launched_ = 0, pending_ = 0; // collectives inside of the leaf: all, and those not waited for
  bool inside_ = false; // of a leaf, of an operator on fake tensors, or of a listener
  std::exception_ptr failure_;
};

} // namespace memplug
