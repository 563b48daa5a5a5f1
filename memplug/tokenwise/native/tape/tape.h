// The operators of one forward of a region, with the storages that they read, make and write. It keeps names, no tensors:
// later forwards that do the same share it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "operators.h"

namespace memplug {

// As `Form` in memplug/tokenwise/engine/tape.py.
enum class Form : uint8_t { VIEW, WRITE, PURE, FIXED, EXCHANGE, VALUE };

// Where a tensor lies in its storage.
struct Geometry {
  c10::SmallVector<int64_t, 4> size, stride; // elements
  int64_t offset; // elements
  at::ScalarType dtype;
  bool conj, neg; // its values are read conjugated, negated
  bool lies = true; // else it is irregular (layouts.h), and all but the dtype is left open

  static Geometry of(const at::Tensor& tensor, int64_t origin = 0);
  bool is_of(const at::Tensor& tensor, int64_t origin = 0) const; // its offset counts from there
  bool operator==(const Geometry& other) const;
  int64_t nbytes() const; // of its elements
};

// Where a tensor is among an operator's arguments or results: an argument's position, and where that is a list, the
// element's, and where that is a list too, the one's in it; else -1.
struct ArgumentPath {
  int32_t position, element = -1, inner = -1;

  bool operator==(const ArgumentPath& other) const {
    return position == other.position && element == other.element && inner == other.inner;
  }
};

struct Use {
  ArgumentPath path;
  int32_t storage;
  Geometry geometry;

  bool operator==(const Use& other) const;
};

struct Record {
  const Operator* op;
  Form form;
  bool root; // it runs whether or not anything reads what it makes
  bool draws;
  bool with_gradients; // were enabled, by which some kernels choose what they return
  std::vector<c10::IValue> arguments; // as `without_tensors`: tensors' lists have as many undefined ones
  std::vector<Use> inputs, outputs;
  std::vector<int32_t> made; // storages; an exchange makes those that it writes to
  std::vector<int32_t> written;

  // Whether a recompute pass runs it though nothing needs what it makes; one that draws is left out all the same.
  bool always_runs() const {
    return root && !draws;
  }

  // Whether a plan says what is captured of it. Of others either always all is, or nothing.
  bool is_planned() const {
    return form == Form::PURE && !op->has(FACTORY) && !op->is_always_captured();
  }

  // Whether its outputs can be substituted in a recompute pass: not those of attention that was given memory for its result.
  bool is_capturable() const {
    return is_planned() || (op->is_expensive() && form != Form::WRITE);
  }

  // Of the first tensor that it returned; 0 where that has no dimension, or there is none.
  int64_t rows() const;

  bool reads(int32_t storage) const;
  bool makes(int32_t storage) const;
  bool writes(int32_t storage) const;
  bool operator==(const Record& other) const;
};

// A tensor that autograd saves for backward, when `after` operators had begun. What it keeps itself has no storage.
struct Save {
  Use use;
  size_t after;

  bool operator==(const Save& other) const;
};

// Why a recompute pass cannot be had from the tape alone.
enum Opaque : uint32_t {
  SUBCLASS = 1 << 0, // a tensor subclass that dispatches for itself
  UNOBSERVED = 1 << 1, // an operator's result was made by none that was observed
  UNFILLED = 1 << 2, // nothing was seen to fill memory that was asked for (unfilled.h)
  FAILED = 1 << 3, // an operator raised
  RESHAPED = 1 << 4, // a tensor was given other memory, or another layout, in place
  TRANSFORMED = 1 << 5, // a function transform, or forward-mode differentiation
  IRREGULAR = 1 << 6, // an operator made a tensor whose elements no geometry tells of (layouts.h)
  NESTED = 1 << 7, // another region ran inside
  ASKED = 1 << 8, // it asked for a gradient itself, which another thread computed
  CHANGED = 1 << 9, // a dispatch mode of the script's changed what an operator was given, did or returned
};

// Storages have running numbers. Those that no operator of the tape made (inputs, parameters, constants) are given, and so
// are those of Python's values (literals.cpp). A parameter that is gathered to other memory has a number of its own,
// whatever it shares its storage with, and offsets in it count from its first element.
struct Tape {
  std::vector<Record> records;
  std::vector<Save> saves;
  std::vector<bool> given; // by storage
  std::vector<int64_t> nbytes; // by storage
  std::vector<bool> regathered; // by storage: such a parameter
  uint32_t opaque = 0;

  // The collective whose result `index` waits for, in memory that it made or writes to; -1 where it is not of this tape,
  // or where it writes to memory that an operator reads before the wait.
  int64_t launch_of(size_t index) const;

  // The operator that made the one storage that exchange `index` fills, where no operator saw the storage between the two:
  // a pass that substitutes the result need not run either. Else -1.
  int64_t sole_maker_of(size_t index) const;

  // Names the operators, and the storages and layouts of what they use: the same in every process. Their numbers and flags
  // are not part of it. Counted once.
  uint64_t fingerprint() const;

  // Whether the first operators and saved tensors are the other's.
  bool begins_as(const Tape& other, size_t records, size_t saves) const;

  mutable std::optional<uint64_t> counted; // `fingerprint`, guarded by Python's lock
};

// How many rows of dimension 0 of what a part of a unit (unit.h) made belong to one row of the first tensor that its unit
// was given; none where it is no whole number of them.
std::optional<int64_t> rows_of_part(const Tape& tape, size_t index);

// Whether two arguments without tensors are the same.
bool equal(const c10::IValue& one, const c10::IValue& other);

// An argument as it is kept: without its tensors, a process group held weakly (exchange.h).
c10::IValue without_tensors(const c10::IValue& argument);

// Calls `visit(path, tensor)` for each tensor of arguments or results.
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
