// The operators of one forward of a region, with the storages that they read, make and write.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "operators.h"

namespace memplug {

// As `Form` in memplug/execute/tape.py.
enum class Form : uint8_t { VIEW, WRITE, PURE, FIXED, EXCHANGE, VALUE };

// Where a tensor lies in its storage.
struct Geometry {
  c10::SmallVector<int64_t, 4> size, stride; // elements
  int64_t offset; // elements
  at::ScalarType dtype;
  bool conj, neg; // its values are read conjugated, negated

  static Geometry of(const at::Tensor& tensor);
  bool is_of(const at::Tensor& tensor) const;
};

// A generator, and its state before an operator that draws from it.
struct Drawn {
  at::Generator generator;
  at::Tensor state;
};

// A tensor among an operator's arguments or results: an argument's position, and where that is a list, the element's.
struct Use {
  int32_t position, element;
  int32_t storage;
  Geometry geometry;
};

struct Record {
  const Operator* op;
  Form form;
  bool root; // it runs whether or not anything reads what it makes
  bool draws;
  std::vector<Drawn> drawn;
  std::vector<c10::IValue> arguments; // tensors are left out, their lists have as many undefined ones
  std::vector<Use> inputs, outputs;
  std::vector<int32_t> made; // storages; an exchange makes those that it writes to
  std::vector<int32_t> written;
};

// Storages by number. Those that no operator of the tape made (inputs, parameters, constants) are given.
class Storages {
 public:
  // Number of a tensor's storage, -1 where no operator has touched it.
  int32_t find(const at::Tensor& tensor) const;

  // The same, a new and given one where it had none.
  int32_t number(const at::Tensor& tensor);

  // A new one for a tensor that an operator made.
  int32_t make(const at::Tensor& tensor);

  void set_given(int32_t number) {
    given_[number] = true;
  }
  bool is_given(int32_t number) const {
    return given_[number];
  }
  int64_t nbytes(int32_t number) const {
    return nbytes_[number];
  }
  size_t size() const {
    return given_.size();
  }

  // The forward is over: addresses name storages no more.
  void forget();

 private:
  int32_t add(const at::Tensor& tensor, bool given);

  ska::flat_hash_map<const c10::StorageImpl*, int32_t> numbers_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> held_; // no storage gets the address of one that is gone
  std::vector<bool> given_;
  std::vector<int64_t> nbytes_;
};

// Why a recompute pass cannot be had from the tape alone.
enum Opaque : uint32_t {
  SUBCLASS = 1 << 0, // a tensor subclass that dispatches for itself
  UNOBSERVED = 1 << 1, // an operator's result was made by none that was observed
  UNFILLED = 1 << 2, // nothing was seen to fill memory that was asked for
  FAILED = 1 << 3, // an operator raised
  RESHAPED = 1 << 4, // a tensor was given other memory, or another layout, in place
};

class Tape {
 public:
  // An operator is about to run; returns its index. Nothing else begins before it ends.
  size_t begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // It has run.
  void end(size_t index, c10::ArrayRef<c10::IValue> results);

  // Autograd saves a tensor for backward: where it lies. An operator's own result is saved before the operator ends.
  Use save(const at::Tensor& tensor);

  // An operator that was looked through has run, since the tape had `before` records.
  void looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results);

  // The forward is over.
  void close();

  std::vector<Record> records;
  Storages storages;
  std::vector<at::Tensor> given; // by storage: the first tensor of each that no operator made
  uint32_t opaque = 0;

 private:
  void give(int32_t number, const at::Tensor& tensor);
  void classify(Record& record);

  bool running_ = false; // the last operator has begun, and not ended
  std::vector<std::pair<int32_t, at::Tensor>> saved_early_; // of storages that the running operator has made

  std::vector<bool> blank_; // storages whose contents no operator has written
};

// A forward that is compared with a tape, operator by operator.
class Verifier {
 public:
  explicit Verifier(const Tape& tape) : tape_(tape) {}

  // Whether it is the one that comes next on the tape, with the same arguments.
  bool begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments);
  bool end(c10::ArrayRef<c10::IValue> results);

  // How many operators were alike.
  size_t verified() const {
    return cursor_;
  }
  const Storages& storages() const {
    return storages_;
  }

 private:
  bool same(const std::vector<Use>& uses, c10::ArrayRef<c10::IValue> values, bool made);

  const Tape& tape_;
  Storages storages_;
  size_t cursor_ = 0;
};

} // namespace memplug
