// The properties of operators that tapes depend on: schema and kernels from torch, traits from
// memplug/tokenwise/engine/operators.py. Each operator is looked up once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensors.h"
#include "torch_private.h"

namespace memplug {

// Traits of an operator, as bits of the number that `describe` in memplug/tokenwise/engine/operators.py returns.
enum Trait : uint32_t {
  COMMUNICATES = 1 << 0, // runs together with other ranks
  EXCHANGE = 1 << 1, // is a c10d operator: writes to its arguments, although its schema does not say so
  FILLS = 1 << 2, // overwrites every element of the tensors that it writes to, and reads none of them
  WRITES_NOTHING = 1 << 3, // is an exchange that writes to no argument
  RANDOM = 1 << 4, // may advance a random generator
  EFFECTS = 1 << 5, // may do more than its outputs show
  VALUE = 1 << 6, // returns a number to Python
  BLANK = 1 << 7, // its output is uninitialized memory
  RESHAPES = 1 << 8, // changes a tensor's memory or layout in place
  FACTORY = 1 << 9, // makes a tensor from no other tensor
  WAITS = 1 << 10, // waits for a collective, whose result it returns in its argument's memory
  // The kinds of expensive operators (memplug/tokenwise/engine/operators.py). Their results are captured unless a plan
  // decides otherwise.
  ROWS = 1 << 11,
  ATTENTION = 1 << 12,
  COLLECTIVE = 1 << 13,
  CHOICE = 1 << 14,
  PARTIAL = 1 << 15, // does not read the tensor that it writes to, and may write only a part of it, or nothing
  UNIT = 1 << 16, // stands for a unit, whose kernels no operator shows (unit.h)
  PART_OF_UNIT = 1 << 17, // stands for one part of a unit (unit.h)
  SHARED = 1 << 18, // stands for a unit that communicates, or for a part of one: all ranks must capture alike
  LIFTS = 1 << 19, // returns a tensor that torch made from Python values, as a literal is
  STATISTICS = 1 << 20, // in training, writes to `running_mean` and `running_var`, although its schema does not say so
  DUAL = 1 << 21, // gives a tensor a tangent (forward-mode differentiation), which no tape describes
};

// One overload of an operator. An object is never freed, since tapes refer to it.
struct Operator {
  c10::OperatorHandle handle;
  std::string schema_name, overload; // such as "aten::add" and "Tensor"; "" for the default overload
  std::string name; // such as "aten::add.Tensor"
  mutable std::atomic<uint32_t> traits; // bits of `Trait`; `note_exchange` changes them
  bool hides_nothing; // is one of torch's own operators, which launch no collective unless their names say so
  bool composite; // only calls other operators, unless the device has a kernel for it
  // whether the device has a kernel of its own for a composite operator, as CUDA has for a norm
  bool kernel_on_cuda, kernel_on_other;
  // whether autocast on the device casts the arguments, and calls the operator again
  bool casts_on_cpu, casts_on_cuda, casts_on_other;
  bool mutates; // writes to memory (`detach_` is in place, but does not)
  bool reads_elements; // may read elements of its arguments, not only their sizes
  size_t argument_count, result_count; // numbers of arguments and results in the schema
  // positions of the arguments with these names (dropout: `dropout_p` or `p_dropout`); -1 if there is none
  int32_t dropout, async_op;
  int32_t running_mean, running_var, training; // the same for batch norm's arguments
  // positions of two arguments of a `PARTIAL` operator: `accumulate`, and the tensor that has as many elements as the
  // operator writes; -1 if there is none
  int32_t accumulate, scattered;

  bool has(Trait trait) const {
    return (known_traits() & trait) != 0;
  }
  bool is_expensive() const {
    return (known_traits() & (ROWS | ATTENTION | COLLECTIVE | CHOICE)) != 0;
  }
  // Returns whether the results are captured whatever a plan decides, as those of collectives and choices (topk) are.
  bool is_always_captured() const {
    return (known_traits() & (COLLECTIVE | CHOICE)) != 0;
  }
  uint32_t known_traits() const {
    return traits.load(std::memory_order_relaxed);
  }

  // Notes that the operator launched collectives. `gives`: the collectives end before the operator returns, and its
  // results lie in new memory, so memplug can capture them.
  void note_exchange(bool gives) const {
    if (gives) {
      traits.fetch_or(COMMUNICATES | COLLECTIVE, std::memory_order_relaxed);
    } else {
      traits.fetch_and(~COLLECTIVE, std::memory_order_relaxed);
      traits.fetch_or(COMMUNICATES, std::memory_order_relaxed);
    }
  }

  // Returns whether some call of the operator may write to the argument at `position`.
  bool writes_to(int32_t position) const {
    const auto* const alias = handle.schema().arguments()[position].alias_info();
    return (mutates && alias != nullptr && alias->isWrite()) ||
        (position == 0 && has(EXCHANGE) && !has(WRITES_NOTHING)) ||
        (has(STATISTICS) && (position == running_mean || position == running_var));
  }

  // Returns whether a call with these arguments writes to the argument at `position`.
  bool writes_to(int32_t position, c10::ArrayRef<c10::IValue> arguments) const {
    const bool trains = training < 0 || !arguments[training].isBool() || arguments[training].toBool();
    return writes_to(position) && (trains || !has(STATISTICS));
  }

  // Returns whether autocast will cast these arguments.
  bool casts(c10::ArrayRef<c10::IValue> arguments) const;

  // Returns whether a call with these arguments only calls other operators.
  bool is_composite(c10::ArrayRef<c10::IValue> arguments) const;

  // Returns whether this is an exchange whose caller waits for it before anything else runs (`async_op=False`).
  bool is_over(c10::ArrayRef<c10::IValue> arguments) const {
    return has(EXCHANGE) && async_op >= 0 && arguments[async_op].isBool() && !arguments[async_op].toBool();
  }

  // Returns whether a call with these arguments may advance a random generator, as attention does only with dropout.
  bool draws(c10::ArrayRef<c10::IValue> arguments) const;
};

// Returns the operator that `function` is a call of; null for a profiler's label, and for `record_stream`, which
// touches no values.
const Operator* operator_of(const at::RecordFunction& function);

// Returns the operator with this schema name and overload ("" for the default one); null if there is none.
const Operator* operator_named(const std::string& name, const std::string& overload);

// Sets the function that returns an operator's traits from its name and overload. Called before the first look-up.
void describe_operators(std::function<uint32_t(const std::string&, const std::string&)> describe);

} // namespace memplug
