// The operators of one forward of a region, and the storages that they read, make and write. A tape names storages by
// number instead of holding tensors, so that later forwards with the same operators share it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "operators.h"

namespace memplug {

// How an operator touches memory. The values are in the order of `Form` in memplug/tokenwise/engine/tape.py, which
// explains them.
enum class Form : uint8_t { VIEW, WRITE, PURE, FIXED, EXCHANGE, VALUE };

// The layout of a tensor within its storage.
struct Geometry {
  c10::SmallVector<int64_t, 4> size, stride; // in elements
  int64_t offset; // in elements
  at::ScalarType dtype;
  bool conj, neg; // torch's lazy bits: the values are the elements, conjugated or negated
  bool lies = true; // false for an irregular tensor (layouts.h), of which only `dtype` is set

  // Returns a tensor's layout. `origin`: the element of the storage that offsets count from.
  static Geometry of(const at::Tensor& tensor, int64_t origin = 0);
  // Returns whether `tensor` has this layout, if its offset is counted from `origin`.
  bool is_of(const at::Tensor& tensor, int64_t origin = 0) const;
  bool operator==(const Geometry& other) const;
  int64_t nbytes() const; // bytes of the tensor's elements
};

// Where a tensor is among an operator's arguments or results. `position`: index of the argument or result. `element`:
// index within it if it is a list, else -1. `inner`: index within that element if the element is itself a list, else
// -1.
struct ArgumentPath {
  int32_t position, element = -1, inner = -1;

  bool operator==(const ArgumentPath& other) const {
    return position == other.position && element == other.element && inner == other.inner;
  }
};

// A tensor among an operator's arguments or results.
struct Use {
  ArgumentPath path;
  int32_t storage;
  Geometry geometry;

  bool operator==(const Use& other) const;
};

// One operator of a tape.
struct Record {
  const Operator* op;
  Form form;
  bool root; // the operator has effects beyond its outputs (`always_runs`)
  bool draws; // the operator draws random numbers
  bool with_gradients; // gradients were enabled; the results of some kernels depend on it
  std::vector<c10::IValue> arguments; // from `without_tensors`
  std::vector<Use> inputs, outputs;
  std::vector<int32_t> made; // storages that the operator makes; for an exchange, those that it writes to
  std::vector<int32_t> written; // storages that the operator writes to

  // Returns whether a recompute pass runs the operator even if nothing needs its outputs.
  bool always_runs() const {
    return root && !draws;
  }

  // Returns whether the plan may decide on the operator's outputs. Those of all other operators are always captured, or
  // never.
  bool is_planned() const {
    return form == Form::PURE && !op->has(FACTORY) && !op->is_always_captured();
  }

  // Returns whether a recompute pass can substitute the operator's outputs. It cannot if, for instance, attention wrote
  // its result to an argument.
  bool is_capturable() const {
    return is_planned() || (op->is_expensive() && form != Form::WRITE);
  }

  // Returns the size of dimension 0 of the first output; 0 for a scalar or without outputs.
  int64_t rows() const;

  bool reads(int32_t storage) const;
  bool makes(int32_t storage) const;
  bool writes(int32_t storage) const;
  bool operator==(const Record& other) const;
};

// A tensor that autograd saved for backward. `use.storage` is -1 if the forward holds the tensor itself.
struct Save {
  Use use;
  size_t after; // number of operators that had begun when autograd saved it

  bool operator==(const Save& other) const;
};

// Reasons why a forward is opaque: running its tape's operators again would not restore all saved tensors.
enum Opaque : uint32_t {
  SUBCLASS = 1 << 0, // a tensor subclass with a dispatch of its own
  UNOBSERVED = 1 << 1, // unobserved code read or wrote memory, or made a tensor
  UNFILLED = 1 << 2, // no operator filled some requested memory (unfilled.h)
  FAILED = 1 << 3, // an operator raised
  RESHAPED = 1 << 4, // a tensor got other memory, or another layout, in place
  TRANSFORMED = 1 << 5, // a function transform, or forward-mode differentiation
  IRREGULAR = 1 << 6, // an operator made a tensor that no geometry describes (layouts.h)
  NESTED = 1 << 7, // another region ran inside of the region
  ASKED = 1 << 8, // the forward asked for a gradient itself, which another thread computed
  CHANGED = 1 << 9, // a dispatch mode of the script changed an operator's arguments, effects or results
};

// The operators and saved tensors of one forward. Storages are numbered from 0. A storage is given if no operator of
// the tape made it (inputs, parameters, constants), or if it is a literal (literals.cpp). A regathered parameter (ZeRO
// 3) has a number of its own even if it shares its storage, and offsets count from its first element.
struct Tape {
  std::vector<Record> records;
  std::vector<Save> saves;
  std::vector<bool> given; // for each storage, whether it is given
  std::vector<int64_t> nbytes; // for each storage, its size in bytes
  // for each storage, whether it is a parameter that ZeRO 3 gathers again, at another address, for backward
  std::vector<bool> regathered;
  uint32_t opaque = 0; // bits of `Opaque`

  // Returns the index of the operator that launched the collective for which operator `index` waits; -1 if the launch
  // is not on this tape, or if the collective is in place and another operator reads its memory before the wait.
  int64_t launch_of(size_t index) const;

  // Returns the index of the operator that made the only storage that exchange `index` fills: a pass that substitutes
  // the exchange's result skips that operator too. Returns -1 if the exchange fills several storages, or if another
  // operator used the storage before it.
  int64_t sole_maker_of(size_t index) const;

  // Returns a hash of the operators, the saved tensors, and the storages and layouts that they use, but not of other
  // arguments (numbers, flags). The hash is the same in every process, and cached.
  uint64_t fingerprint() const;

  // Returns whether the first `records` operators and the first `saves` saved tensors equal those of `other`.
  bool begins_as(const Tape& other, size_t records, size_t saves) const;

  mutable std::optional<uint64_t> counted; // cache of `fingerprint`; guarded by Python's lock
};

// Returns how many rows of a unit's part (unit.h) belong to one row of the unit's first input; none if that is not a
// whole number, or if the unit does not work row by row. `index`: the part's operator.
std::optional<int64_t> rows_of_part(const Tape& tape, size_t index);

// Returns whether two arguments from `without_tensors` are equal.
bool equal(const c10::IValue& one, const c10::IValue& other);

// Returns an argument as a tape keeps it: without tensors (lists keep their length), and with process groups as weak
// references (exchange.h).
c10::IValue without_tensors(const c10::IValue& argument);

// Calls `visit(path, tensor)` for each tensor among an operator's arguments or results.
template <typename Visit>
void each_use(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (size_t i = 0; i < values.size(); ++i) {
    ArgumentPath path{static_cast<int32_t>(i)};
    if (values[i].isTensor()) {
      each_tensor(values[i], [&](const at::Tensor& tensor) { visit(path, tensor); });
    } else if (values[i].isList()) {
      for (const c10::IValue& element : values[i].toListRef()) {
        ++path.element;
        path.inner = -1;
        if (element.isList()) {
          for (const c10::IValue& each : element.toListRef()) {
            ++path.inner;
            each_tensor(each, [&](const at::Tensor& tensor) { visit(path, tensor); });
          }
        } else {
          each_tensor(element, [&](const at::Tensor& tensor) { visit(path, tensor); });
        }
      }
    }
  }
}

} // namespace memplug
