// The script's dispatch modes (torch.utils._python_dispatch) around the operators of a forward. torch calls such a mode
// instead of an operator. Most modes then hand the operator on: they call it with the same arguments.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "operators.h"
#include "torch_private.h"

namespace memplug {

// Checks whether the dispatch modes around an operator hand it on and return its results unchanged.
class Modes {
 public:
  // Returns whether torch would call modes of the script for an operator that began now on this thread.
  static bool around();

  // Notes that an operator begins.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Returns whether an operator is running for which torch calls modes.
  bool are_called() const {
    return called_.has_value();
  }

  // Kinds of operators that run while modes handle an operator. HANDED_ON: that operator itself, which a mode calls
  // with the same arguments. BESIDE: another operator, which a mode calls. WITHIN: an operator that one of these two
  // calls.
  enum class Inside : uint8_t { HANDED_ON, BESIDE, WITHIN };

  // Notes that an operator begins while modes handle the operator of `begin`. Returns its kind.
  Inside begin_inside(const at::RecordFunction& function);

  // Notes that an operator of kind `inside` has ended.
  void end_inside(Inside inside, c10::ArrayRef<c10::IValue> results);

  // Notes that the operator of `begin` has ended. Returns whether it ran exactly once, and its arguments and results
  // passed the modes unchanged.
  bool end(c10::ArrayRef<c10::IValue> results);

 private:
  struct CalledOperator {
    const Operator* op;
    std::vector<c10::IValue> arguments;
    int64_t modes; // number of modes around the operator
    int64_t open = 0; // number of modes that are in the middle of handing the operator on
    bool any = false; // a mode called some operator
    bool beside = false; // another operator, which a mode called, is running
    bool writes = false; // a mode wrote to the operator's memory, or ran the operator more than once
    std::optional<std::vector<c10::IValue>> made; // the operator's results, before modes could change them
  };
  bool touches(c10::ArrayRef<const c10::IValue> values) const;

  std::optional<CalledOperator> called_;
};

// The script's dispatch and function modes around a forward. Guarded by Python's lock.
class ModesAround {
 public:
  // Stores this thread's present modes.
  ModesAround();

  // While an instance lives, this thread runs in all of the forward's function modes, and in those of the forward's
  // dispatch modes that are still active. So a mode around backward alone affects backward, but no recompute pass.
  class Again {
   public:
    explicit Again(const ModesAround& forward);
    ~Again();
    Again(const Again&) = delete;
    Again& operator=(const Again&) = delete;

   private:
    std::optional<DispatchModes> dispatch_;
    std::optional<FunctionModes> functions_;
  };

 private:
  std::vector<std::shared_ptr<DispatchMode>> dispatch_;
  std::vector<std::shared_ptr<c10::SafePyObject>> functions_;
};

} // namespace memplug
