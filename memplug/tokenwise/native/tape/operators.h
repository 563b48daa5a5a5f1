// What the tape needs to know about an operator, looked up once: its schema and kernels here, its meaning from Python.
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

// Packed as `describe` in memplug/tokenwise/engine/operators.py.
enum Trait : uint32_t {
  COMMUNICATES = 1 << 0, // other ranks take part
  EXCHANGE = 1 << 1, // of c10d: writes to its arguments, although its schema does not say so
  FILLS = 1 << 2, // writes every element of the tensors that it writes to, and reads none of them
  WRITES_NOTHING = 1 << 3, // an exchange without a result
  RANDOM = 1 << 4, // may advance a random generator
  EFFECTS = 1 << 5, // may do more than its outputs show
  VALUE = 1 << 6, // gives Python a number
  BLANK = 1 << 7, // its output is memory that another operator has to fill
  RESHAPES = 1 << 8, // gives a tensor other memory, or another layout, in place
  FACTORY = 1 << 9, // makes a tensor out of nothing
  WAITS = 1 << 10, // for what a collective has launched, in the memory of its argument
  ROWS = 1 << 11, // the kinds of expensive operators (memplug/tokenwise/engine/operators.py): their results are captured
  ATTENTION = 1 << 12, // unless a plan says otherwise
  COLLECTIVE = 1 << 13,
  CHOICE = 1 << 14,
  PARTIAL = 1 << 15, // reads none of the tensor that it writes to, and may write a part of it, or nothing
  UNIT = 1 << 16, // a call that no operator shows, and what it made (unit.h)
  PART_OF_UNIT = 1 << 17,
  SHARED = 1 << 18, // of a unit that communicates: what is captured of it must be the same on all ranks
  LIFTS = 1 << 19, // hands out a tensor that torch has made by itself, such as one of Python's values
  STATISTICS = 1 << 20, // in training, writes to `running_mean` and `running_var`, although its schema does not say so
  DUAL = 1 << 21, // gives a tensor a tangent, which no tape tells of
};

struct Operator {
  c10::OperatorHandle handle;
  std::string schema_name, overload; // "aten::add", "Tensor"; "" for the default one
  std::string name; // "aten::add.Tensor"
  mutable std::atomic<uint32_t> traits; // once it has run, also what it has called
  bool hides_nothing; // torch's own: it launches no collective that its name does not tell of
  bool composite; // it calls other operators, and does nothing besides,
  bool kernel_on_cuda, kernel_on_other; // unless there is a kernel for the device, as CUDA's of a norm
  bool casts_on_cpu, casts_on_cuda, casts_on_other; // under autocast it casts its arguments first, and is called again
  bool mutates; // memory: `detach_` does not
  bool reads_elements; // of what it is given, not its sizes alone
  size_t argument_count, result_count; // by its schema
  int32_t dropout, async_op; // positions of the arguments `dropout_p` and `async_op`, or -1
  int32_t running_mean, running_var, training; // likewise; -1 of what is no statistic
  int32_t accumulate, scattered; // of a `PARTIAL` one's `accumulate`, and of the tensor with as many elements as it writes

  bool has(Trait trait) const {
    return (known_traits() & trait) != 0;
  }
  bool is_expensive() const {
    return (known_traits() & (ROWS | ATTENTION | COLLECTIVE | CHOICE)) != 0;
  }
  // Whatever a plan says: the results of collectives and choices.
  bool is_always_captured() const {
    return (known_traits() & (COLLECTIVE | CHOICE)) != 0;
  }
  uint32_t known_traits() const {
    return traits.load(std::memory_order_relaxed);
  }

  // It has launched collectives. `gives`: they are over where it ends, and what it returns is in memory of its own.
  void note_exchange(bool gives) const {
    if (gives) {
      traits.fetch_or(COMMUNICATES | COLLECTIVE, std::memory_order_relaxed);
    } else {
      traits.fetch_and(~COLLECTIVE, std::memory_order_relaxed);
      traits.fetch_or(COMMUNICATES, std::memory_order_relaxed);
    }
  }

  // Whether it may write to an argument, by its position.
  bool writes_to(int32_t position) const {
    const auto* const alias = handle.schema().arguments()[position].alias_info();
    return (mutates && alias != nullptr && alias->isWrite()) ||
        (position == 0 && has(EXCHANGE) && !has(WRITES_NOTHING)) ||
        (has(STATISTICS) && (position == running_mean || position == running_var));
  }

  // Whether this call does.
  bool writes_to(int32_t position, c10::ArrayRef<c10::IValue> arguments) const {
    const bool trains = training < 0 || !arguments[training].isBool() || arguments[training].toBool();
    return writes_to(position) && (trains || !has(STATISTICS));
  }

  // Whether this call is one under autocast.
  bool casts(c10::ArrayRef<c10::IValue> arguments) const;

  // Whether with these arguments it is what it calls.
  bool is_composite(c10::ArrayRef<c10::IValue> arguments) const;

  // Whether this call of an exchange is waited for before anything else runs.
  bool is_over(c10::ArrayRef<c10::IValue> arguments) const {
    return has(EXCHANGE) && async_op >= 0 && arguments[async_op].isBool() && !arguments[async_op].toBool();
  }

  // Whether this call advances a random generator: attention does only where its dropout is above zero.
  bool draws(c10::ArrayRef<c10::IValue> arguments) const;
};

// Null for labels, which are no operators, and for `record_stream`, which touches no values. Operators live for ever.
const Operator* operator_of(const at::RecordFunction& function);

// By its schema's name and its overload, "" for the default one; null where there is none.
const Operator* operator_named(const std::string& name, const std::string& overload);

// Who gives an operator's traits, by its name and overload; to be set before the first operator is looked up.
void describe_operators(std::function<uint32_t(const std::string&, const std::string&)> describe);

} // namespace memplug
