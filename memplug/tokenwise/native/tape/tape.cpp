#include "tape.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "exchange.h"
#include "layouts.h"

namespace memplug {
namespace {

bool holds(const std::vector<int32_t>& numbers, int32_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

bool has_tensors(const c10::IValue& value) {
  bool found = false;
  each_tensor(value, [&](const at::Tensor&) { found = true; });
  return found;
}

// An FNV-1a hash.
class Hash {
 public:
  void add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      value_ = (value_ ^ (number >> shift & 0xFF)) * 0x100000001B3ull;
    }
  }
  void add(const std::string& text) {
    add(text.size());
    for (const char letter : text) {
      value_ = (value_ ^ static_cast<unsigned char>(letter)) * 0x100000001B3ull;
    }
  }
  void add(const Use& use) {
    const Geometry& geometry = use.geometry;
    for (const int64_t number :
         {int64_t{use.path.position}, int64_t{use.path.element}, int64_t{use.path.inner}, int64_t{use.storage},
          geometry.offset, int64_t{static_cast<int8_t>(geometry.dtype)}, int64_t{geometry.conj}, int64_t{geometry.neg},
          static_cast<int64_t>(geometry.size.size())}) {
      add(static_cast<uint64_t>(number));
    }
    for (size_t i = 0; i < geometry.size.size(); ++i) {
      add(static_cast<uint64_t>(geometry.size[i]));
      add(static_cast<uint64_t>(geometry.stride[i]));
    }
  }
  uint64_t value() const {
    return value_;
  }

 private:
  uint64_t value_ = 0xCBF29CE484222325ull;
};

bool same_number(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) {
    return one.defined() == other.defined();
  }
  return one.scalar_type() == other.scalar_type() &&
      std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// Returns a copy of a number that torch wrapped as a tensor. The copy's memory comes from `new`, so that the tape holds
// no block of the arena or of torch's allocator for good.
at::Tensor kept_number(const at::Tensor& number) {
  if (!number.defined()) {
    return number;
  }
  TORCH_INTERNAL_ASSERT(number.is_cpu() && number.nbytes() <= sizeof(c10::complex<double>));
  auto* const memory = new c10::complex<double>;
  const auto options = number.options().requires_grad(false);
  auto kept = at::from_blob(memory, number.sizes(), [memory](void*) { delete memory; }, options);
  std::memcpy(memory, number.const_data_ptr(), number.nbytes());
  kept.unsafeGetTensorImpl()->set_wrapped_number(true);
  return kept;
}

} // namespace

c10::IValue without_tensors(const c10::IValue& argument) {
  if (!has_tensors(argument)) {
    if (argument.isTensor()) {
      return kept_number(argument.toTensor());
    }
    return argument.isObject() || argument.isCapsule() ? kept_object(argument) : argument;
  }
  if (argument.isTensor()) {
    return {};
  }
  c10::impl::GenericList list(argument.toList().elementType());
  for (const c10::IValue& element : argument.toListRef()) {
    list.push_back(element.isTensor() ? c10::IValue(at::Tensor()) : without_tensors(element));
  }
  return list;
}

bool equal(const c10::IValue& one, const c10::IValue& other) {
  if (one.isInt() && other.isInt()) {
    return one.toInt() == other.toInt();
  }
  if (one.isDouble() && other.isDouble()) {
    const double x = one.toDouble(), y = other.toDouble();
    return x == y || (x != x && y != y); // NaN equals NaN
  }
  if (one.isBool() && other.isBool()) {
    return one.toBool() == other.toBool();
  }
  if (one.isNone() || other.isNone()) {
    return one.isNone() && other.isNone();
  }
  // wrapped numbers and undefined tensors; `without_tensors` removed all others
  if (one.isTensor() || other.isTensor()) {
    return one.isTensor() && other.isTensor() && same_number(one.toTensor(), other.toTensor());
  }
  if (one.isList() && other.isList()) {
    const auto ones = one.toListRef(), others = other.toListRef();
    return std::equal(ones.begin(), ones.end(), others.begin(), others.end(), equal);
  }
  if ((one.isObject() || one.isCapsule()) && (other.isObject() || other.isCapsule())) {
    return same_object(one, other);
  }
  return one.tagKind() == other.tagKind() && one == other;
}

Geometry Geometry::of(const at::Tensor& tensor, int64_t origin) {
  if (is_irregular(tensor)) {
    return {{}, {}, 0, tensor.scalar_type(), false, false, false};
  }
  const auto size = tensor.sizes(), stride = tensor.strides();
  return {
      {size.begin(), size.end()},
      {stride.begin(), stride.end()},
      tensor.storage_offset() - origin,
      tensor.scalar_type(),
      tensor.is_conj(),
      tensor.is_neg()};
}

bool Geometry::is_of(const at::Tensor& tensor, int64_t origin) const {
  if (!lies || is_irregular(tensor)) {
    return lies != is_irregular(tensor) && dtype == tensor.scalar_type();
  }
  return dtype == tensor.scalar_type() && offset == tensor.storage_offset() - origin && conj == tensor.is_conj() &&
      neg == tensor.is_neg() && c10::IntArrayRef(size) == tensor.sizes() &&
      c10::IntArrayRef(stride) == tensor.strides();
}

bool Geometry::operator==(const Geometry& other) const {
  return dtype == other.dtype && offset == other.offset && conj == other.conj && neg == other.neg && lies == other.lies &&
      c10::IntArrayRef(size) == c10::IntArrayRef(other.size) &&
      c10::IntArrayRef(stride) == c10::IntArrayRef(other.stride);
}

int64_t Geometry::nbytes() const {
  return c10::multiply_integers(c10::IntArrayRef(size)) * static_cast<int64_t>(c10::elementSize(dtype));
}

bool Use::operator==(const Use& other) const {
  return path == other.path && storage == other.storage && geometry == other.geometry;
}

bool Save::operator==(const Save& other) const {
  return use == other.use && after == other.after;
}

int64_t Record::rows() const {
  return outputs.empty() || outputs.front().geometry.size.empty() ? 0 : outputs.front().geometry.size.front();
}

bool Record::reads(int32_t storage) const {
  return std::any_of(inputs.begin(), inputs.end(), [&](const Use& use) { return use.storage == storage; });
}

bool Record::makes(int32_t storage) const {
  return holds(made, storage);
}

bool Record::writes(int32_t storage) const {
  return holds(written, storage);
}

bool Record::operator==(const Record& other) const {
  return op == other.op && form == other.form && root == other.root && draws == other.draws && with_gradients == other.with_gradients &&
      inputs == other.inputs && outputs == other.outputs &&
      std::equal(arguments.begin(), arguments.end(), other.arguments.begin(), other.arguments.end(), equal);
}

int64_t Tape::launch_of(size_t index) const {
  const int32_t storage = records[index].inputs.front().storage;
  bool is_read = false;
  for (size_t i = index; i-- > 0;) {
    const Record& record = records[i];
    if (record.makes(storage) || record.writes(storage)) {
      const bool is_read_in_place = is_read && !record.makes(storage);
      return record.op->has(COMMUNICATES) && !is_read_in_place ? static_cast<int64_t>(i) : -1;
    }
    is_read = is_read || (record.form != Form::VIEW && record.reads(storage));
  }
  return -1;
}

int64_t Tape::sole_maker_of(size_t index) const {
  if (records[index].made.size() != 1) {
    return -1;
  }
  const int32_t storage = records[index].made.front();
  for (size_t i = index; i-- > 0;) {
    const Record& record = records[i];
    if (record.form == Form::PURE && record.made.size() == 1 && record.makes(storage) && record.outputs.size() == 1) {
      return static_cast<int64_t>(i);
    }
    if (record.form != Form::VIEW && (record.reads(storage) || record.makes(storage))) {
      return -1;
    }
  }
  return -1;
}

std::optional<int64_t> rows_of_part(const Tape& tape, size_t index) {
  size_t unit = index;
  while (!tape.records[unit].op->has(UNIT)) {
    --unit;
  }
  const Record& part = tape.records[index];
  const auto& inputs = tape.records[unit].inputs;
  const bool none = inputs.empty() || inputs.front().geometry.size.empty();
  const int64_t made = part.rows(), given = none ? 0 : inputs.front().geometry.size.front();
  return part.op->overload == "rows" && made > 0 && given > 0 && made % given == 0 ? std::optional(made / given) : std::nullopt;
}

uint64_t Tape::fingerprint() const {
  if (counted) {
    return *counted;
  }
  Hash hash;
  const auto add_uses = [&](const std::vector<Use>& uses) {
    hash.add(uses.size());
    for (const Use& use : uses) {
      hash.add(use);
    }
  };
  for (const Record& record : records) {
    hash.add(record.op->name);
    hash.add(static_cast<uint64_t>(record.form) << 2 | record.root << 1 | record.draws);
    add_uses(record.inputs);
    add_uses(record.outputs);
  }
  for (const Save& save : saves) {
    hash.add(save.use);
    hash.add(save.after);
  }
  for (size_t storage = 0; storage < nbytes.size(); ++storage) {
    hash.add(static_cast<uint64_t>(nbytes[storage]) << 1 | given[storage]);
  }
  counted = hash.value();
  return *counted;
}

bool Tape::begins_as(const Tape& other, size_t count, size_t saved) const {
  return records.size() >= count && saves.size() >= saved && other.records.size() >= count &&
      other.saves.size() >= saved && std::equal(records.begin(), records.begin() + count, other.records.begin()) &&
      std::equal(saves.begin(), saves.begin() + saved, other.saves.begin());
}

} // namespace memplug
