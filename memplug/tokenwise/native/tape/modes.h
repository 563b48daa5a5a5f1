// Dispatch modes of the script's own (torch.utils._python_dispatch) around the operators of a forward: they are called in
// the place of an operator, and most hand it on as it is.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "operators.h"
#include "torch_private.h"

namespace memplug {

class Modes {
 public:
  // Whether this thread has any.
  static bool around();

  // An operator begins.
  void begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Whether one has begun, and not ended, that modes are called for.
  bool are_called() const {
    return called_.has_value();
  }

  // What runs inside of it: that operator with its arguments, handed on; another one that a mode calls; or what one of these
  // calls.
  enum class Inside : uint8_t { HANDED_ON, BESIDE, WITHIN };

  // An operator begins inside of it.
  Inside begin_inside(const at::RecordFunction& function);

  // It is over.
  void end_inside(Inside inside, c10::ArrayRef<c10::IValue> results);

  // The operator has ended: whether it ran once as it was called, and what it made is what it returned.
  bool end(c10::ArrayRef<c10::IValue> results);

 private:
  struct Call {
    const Operator* op;
    std::vector<c10::IValue> arguments;
    int64_t modes; // how many there were
    int64_t open = 0; // how many of them are handing it on
    bool any = false; // an operator ran inside of it
    bool beside = false; // another operator runs that one of them called
    bool writes = false; // a mode wrote to memory, or it ran more than once
    std::optional<std::vector<c10::IValue>> made;
  };
  bool touches(c10::ArrayRef<const c10::IValue> values) const;

  std::optional<Call> called_;
};

// The script's modes around a forward, of operators and of functions. Guarded by Python's lock.
class ModesAround {
 public:
  // Those that this thread has now.
  ModesAround();

  // While one lives, this thread is in the forward's function modes, and in those of its dispatch modes that it is in still:
  // a mode around backward alone sees and changes backward, no recompute pass.
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
