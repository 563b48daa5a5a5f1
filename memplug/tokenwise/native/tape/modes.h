// The script's dispatch modes (torch.utils._python_dispatch) around the operators of a forward. torch calls them
// instead of an operator, and most hand it on unchanged.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "operators.h"
#include "torch_private.h"

namespace memplug {

// Checks whether the modes around an operator hand it on unchanged.
class Modes {
 public:
  // Returns whether this thread has such modes.
  static bool around();

  // Takes note that an operator begins.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Returns whether an operator that modes are called for has begun and not ended.
  bool are_called() const {
    return called_.has_value();
  }

  // A call inside of such an operator: the operator itself with its arguments, handed on; another operator that a mode
  // calls; or a call made by one of these.
  enum class Inside : uint8_t { HANDED_ON, BESIDE, WITHIN };

  // Takes note that an operator begins inside.
  Inside begin_inside(const at::RecordFunction& function);

  // Takes note that it has ended.
  void end_inside(Inside inside, c10::ArrayRef<c10::IValue> results);

  // Ends the operator. Returns whether it ran once as it was called, and returned what it made.
  bool end(c10::ArrayRef<c10::IValue> results);

 private:
  struct CalledOperator {
    const Operator* op;
    std::vector<c10::IValue> arguments;
    int64_t modes; // number of modes
    int64_t open = 0; // number of modes that are handing it on
    bool any = false; // an operator ran inside of it
    bool beside = false; // another operator is running, called by a mode
    bool writes = false; // a mode wrote to its memory, or it ran more than once
    std::optional<std::vector<c10::IValue>> made;
  };
  bool touches(c10::ArrayRef<const c10::IValue> values) const;

  std::optional<CalledOperator> called_;
};

// The script's dispatch and function modes around a forward. Guarded by Python's lock.
class ModesAround {
 public:
  // Takes those of this thread.
  ModesAround();

  // While one lives, this thread is in the forward's function modes, and in those of its dispatch modes that are still
  // active. A mode around backward alone sees and changes backward, but no recompute pass.
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
