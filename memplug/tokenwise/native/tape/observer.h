// Sees the operators of a region's forward, on the thread that runs it.
#pragma once

#include <exception>
#include <optional>
#include <vector>

#include "bus.h"
#include "forward.h"
#include "modes.h"
#include "torch_private.h"

namespace memplug {

// Tells a forward of this thread's operators until it is destroyed.
//
// An operator that only calls others (composite, under autocast, with tensors of a subclass) is looked through: the
// operators that it calls are noted in its place. All others are leaves, and what runs inside of a leaf is not noted, nor
// are operators on fake tensors.
class Observer {
 public:
  explicit Observer(Forward& forward);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // Throws what a listener has thrown: torch lets nothing out of a callback.
  void rethrow();

  // A tensor's address escaped: what is done with it is no operator.
  static void address_taken(const at::Tensor& tensor);

  // Python reads its values past operators.
  static void read(const at::Tensor& tensor);

  // Whether a forward of this thread is told of its operators; and whether one that began now would be noted: what runs
  // inside of a leaf is its own affair.
  static bool is_active();
  static bool is_noting();

  // In the child of a fork, in which other threads' forwards are no more.
  static void end_in_child();

 private:
  enum class What : uint8_t { IGNORED, THROUGH, LEAF, FAKE };
  struct Running {
    What what;
    bool mutates;
    size_t before; // how many operators had begun
    std::optional<Modes::Inside> inside = {}; // of an operator that modes are called for
  };

  static bool begin(Call& call);
  static void end(Call& call);
  static constexpr Watcher watcher{Need::TENSORS, begin, end};
  Running begin(const at::RecordFunction& function, const Operator& op);
  void look_inside(const at::RecordFunction& function);
  void note_exchanges(c10::ArrayRef<c10::IValue> results);
  void fail();

  Forward& forward_;
  Observer* outer_;
  const Watching watching_{FORWARDS, watcher};
  std::vector<Running> running_;
  const Operator* leaf_ = nullptr; // that runs, where what it calls says more of it than its name
  Modes modes_; // that are called for the leaf
  int launched_ = 0, pending_ = 0; // collectives inside of it: all of them, and those that were not waited for
  bool inside_ = false; // of a leaf, of an operator on fake tensors, or of a listener
  std::exception_ptr failure_;
};

} // namespace memplug
