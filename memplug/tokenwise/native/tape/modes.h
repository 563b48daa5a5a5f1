// The script's dispatch modes (torch.utils._python_dispatch) around the operators of a forward. torch calls these modes
// instead of an operator. Most modes hand the operator on unchanged.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "operators.h"
#include "torch_private.h"

namespace memplug {

// Checks whether the dispatch modes around an operator hand it on unchanged.
class Modes {
 public:
  // Returns whether torch would now call modes of the script for an operator of this thread.
  static bool around();

  // Takes note that an operator begins.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Returns whether an operator for which torch calls modes has begun and not ended.
  bool are_called() const {
    return called_.has_value();
  }

  // Kinds of calls while an operator's modes run. HANDED_ON: a mode calls the operator itself, with its arguments.
  // BESIDE: a mode calls another operator. WITHIN: one of these operators calls something.
  enum class Inside : uint8_t { HANDED_ON, BESIDE, WITHIN };

  // Takes note that a call begins while the operator's modes run. Returns its kind.
  Inside begin_inside(const at::RecordFunction& function);

  // Takes note that a call of kind `inside` has ended.
  void end_inside(Inside inside, c10::ArrayRef<c10::IValue> results);

  // Takes note that the operator has ended. Returns whether it ran once, with the arguments that it was called with,
  // and its results reached the caller unchanged.
  bool end(c10::ArrayRef<c10::IValue> results);

 private:
  struct CalledOperator {
    const Operator* op;
    std::vector<c10::IValue> arguments;
    int64_t modes; // number of modes
    int64_t open = 0; // number of modes that are handing the operator on
    bool any = false; // a mode called some operator
    bool beside = false; // another operator is running, called by a mode
    bool writes = false; // a mode wrote to the operator's memory, or ran the operator more than once
    std::optional<std::vector<c10::IValue>> made; // the operator's results, before modes could change them
  };
  bool touches(c10::ArrayRef<const c10::IValue> values) const;

  std::optional<CalledOperator> called_;
};

// The script's dispatch and function modes around a forward. Guarded by Python's lock.
class ModesAround {
 public:
  // Takes the modes of this thread.
  ModesAround();

  // While an instance lives, this thread is in all of the forward's function modes, and in the forward's dispatch modes
  // that are still active. So a mode around backward alone sees and changes backward, but no recompute pass.
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
