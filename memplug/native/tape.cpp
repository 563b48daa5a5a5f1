#include "tape.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace memplug {
namespace {

// Calls `visit(position, element, tensor)`; the element is -1 where the value is no list.
template <typename Visit>
void each_use(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto position = static_cast<int32_t>(i);
    if (values[i].isTensor()) {
      each_tensor(values[i], [&](const at::Tensor& tensor) { visit(position, -1, tensor); });
    } else if (values[i].isList()) {
      int32_t element = 0;
      for (const c10::IValue& each : values[i].toListRef()) {
        each_tensor(each, [&](const at::Tensor& tensor) { visit(position, element, tensor); });
        ++element;
      }
    }
  }
}

bool holds(const std::vector<int32_t>& numbers, int32_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

bool has_tensors(const c10::IValue& value) {
  bool found = false;
  each_tensor(value, [&](const at::Tensor&) { found = true; });
  return found;
}

bool same_number(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) {
    return one.defined() == other.defined();
  }
  return one.scalar_type() == other.scalar_type() &&
      std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// An argument as it is kept: without its tensors.
c10::IValue without_tensors(const c10::IValue& argument) {
  if (!has_tensors(argument)) {
    return argument;
  }
  if (argument.isTensor()) {
    return {};
  }
  c10::impl::GenericList list(argument.toList().elementType());
  for (const c10::IValue& element : argument.toListRef()) {
    list.push_back(element.isTensor() ? c10::IValue(at::Tensor()) : element);
  }
  return list;
}

// The generators that an operator may draw from, as they are now: the one among its arguments, else the default ones of
// the CPU and of the device that its tensors are on, or that is current.
std::vector<Drawn> generators_of(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Generator> generators;
  std::optional<c10::Device> device;
  for (const c10::IValue& argument : arguments) {
    if (argument.isGenerator()) {
      generators = {argument.toGenerator()};
      break;
    }
    each_tensor(
        argument, [&](const at::Tensor& tensor) { device = tensor.is_cpu() ? device : tensor.device(); });
  }
  if (generators.empty()) {
    generators.push_back(at::globalContext().defaultGenerator(c10::Device(c10::kCPU)));
    if (!device && at::globalContext().hasCUDA() && c10::impl::hasDeviceGuardImpl(c10::kCUDA)) {
      device = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice();
    }
    if (device) {
      generators.push_back(at::globalContext().defaultGenerator(*device));
    }
  }
  std::vector<Drawn> drawn;
  for (at::Generator& generator : generators) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    drawn.push_back({generator, generator.get_state()});
  }
  return drawn;
}

// Whether two arguments without tensors are the same.
bool equal(const c10::IValue& one, const c10::IValue& other) {
  if (one.isInt() && other.isInt()) {
    return one.toInt() == other.toInt();
  }
  if (one.isDouble() && other.isDouble()) {
    const double x = one.toDouble(), y = other.toDouble();
    return x == y || (x != x && y != y); // NaN, too
  }
  if (one.isBool() && other.isBool()) {
    return one.toBool() == other.toBool();
  }
  if (one.isNone() || other.isNone()) {
    return one.isNone() && other.isNone();
  }
  if (one.isIntList() && other.isIntList()) {
    return one.toIntList().vec() == other.toIntList().vec();
  }
  if (one.isTensor() || other.isTensor()) { // wrapped numbers and undefined ones: the others are uses
    return one.isTensor() && other.isTensor() && same_number(one.toTensor(), other.toTensor());
  }
  return one.tagKind() == other.tagKind() && one == other;
}

} // namespace

Geometry Geometry::of(const at::Tensor& tensor) {
  const auto size = tensor.sizes(), stride = tensor.strides();
  return {
      {size.begin(), size.end()},
      {stride.begin(), stride.end()},
      tensor.storage_offset(),
      tensor.scalar_type(),
      tensor.is_conj(),
      tensor.is_neg()};
}

bool Geometry::is_of(const at::Tensor& tensor) const {
  return dtype == tensor.scalar_type() && offset == tensor.storage_offset() && conj == tensor.is_conj() &&
      neg == tensor.is_neg() &&
      c10::IntArrayRef(size) == tensor.sizes() && c10::IntArrayRef(stride) == tensor.strides();
}

// -- storages ---------------------------------------------------------------------------------------------------------

int32_t Storages::find(const at::Tensor& tensor) const {
  const auto found = numbers_.find(tensor.storage().unsafeGetStorageImpl());
  return found != numbers_.end() ? found->second : -1;
}

int32_t Storages::number(const at::Tensor& tensor) {
  const int32_t found = find(tensor);
  return found >= 0 ? found : add(tensor, true);
}

int32_t Storages::make(const at::Tensor& tensor) {
  return add(tensor, false);
}

int32_t Storages::add(const at::Tensor& tensor, bool given) {
  const auto& storage = tensor.storage();
  const auto number = static_cast<int32_t>(given_.size());
  numbers_[storage.unsafeGetStorageImpl()] = number;
  held_.emplace_back(storage.getWeakStorageImpl());
  given_.push_back(given);
  nbytes_.push_back(static_cast<int64_t>(storage.nbytes()));
  return number;
}

void Storages::forget() {
  numbers_.clear();
  held_.clear();
}

// -- recording --------------------------------------------------------------------------------------------------------

size_t Tape::begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  Record record{};
  record.op = &op;
  record.draws = op.draws(arguments);
  if (record.draws) {
    record.drawn = generators_of(arguments);
  }
  record.arguments.reserve(arguments.size());
  for (const c10::IValue& argument : arguments) {
    record.arguments.push_back(without_tensors(argument));
  }
  const auto& schema = op.handle.schema().arguments();
  each_use(arguments, [&](int32_t position, int32_t element, const at::Tensor& tensor) {
    if (!tensor.has_storage()) {
      opaque |= SUBCLASS;
      return;
    }
    const int32_t number = storages.number(tensor);
    give(number, tensor);
    record.inputs.push_back({position, element, number, Geometry::of(tensor)});
    const auto* alias = schema[position].alias_info();
    const bool first_of_exchange = op.has(EXCHANGE) && !op.has(WRITES_NOTHING) && position == 0;
    if ((alias != nullptr && alias->isWrite()) || first_of_exchange) {
      record.written.push_back(number);
    }
  });
  records.push_back(std::move(record));
  running_ = true;
  return records.size() - 1;
}

void Tape::give(int32_t number, const at::Tensor& tensor) {
  given.resize(std::max(given.size(), storages.size()));
  if (storages.is_given(number) && !given[number].defined()) {
    given[number] = tensor.is_leaf() ? tensor : tensor.tensor_data(); // without the graph that it comes from
  }
}

Use Tape::save(const at::Tensor& tensor) {
  int32_t number = storages.find(tensor);
  if (number < 0 && running_) {
    number = storages.make(tensor);
    saved_early_.emplace_back(number, tensor.tensor_data());
  } else if (number < 0) {
    number = storages.number(tensor);
  }
  give(number, tensor);
  return {0, -1, number, Geometry::of(tensor)};
}

void Tape::end(size_t index, c10::ArrayRef<c10::IValue> results) {
  Record& record = records[index];
  running_ = false;
  if (results.size() != record.op->handle.schema().returns().size()) {
    opaque |= FAILED;
    return;
  }
  std::vector<int32_t> read;
  for (const Use& use : record.inputs) {
    read.push_back(use.storage);
  }
  each_use(results, [&](int32_t position, int32_t element, const at::Tensor& tensor) {
    if (!tensor.has_storage()) {
      opaque |= SUBCLASS;
      return;
    }
    int32_t number = storages.find(tensor);
    const bool early = std::any_of(
        saved_early_.begin(), saved_early_.end(), [&](const auto& saved) { return saved.first == number; });
    if (!holds(read, number) && !holds(record.made, number)) {
      number = early ? number : storages.make(tensor);
      record.made.push_back(number);
    }
    record.outputs.push_back({position, element, number, Geometry::of(tensor)});
  });
  for (const auto& [number, tensor] : saved_early_) {
    if (!holds(record.made, number)) { // no result, such as a copy of memory that is about to be overwritten: it is kept
      storages.set_given(number);
      give(number, tensor);
    }
  }
  saved_early_.clear();
  classify(record);
}

void Tape::classify(Record& record) {
  const Operator& op = *record.op;
  blank_.resize(storages.size());
  record.form = record.made.empty() ? Form::VIEW : Form::PURE;
  if (op.has(EXCHANGE)) {
    record.form = Form::EXCHANGE;
    record.root = true;
    record.made = record.written;
  } else if (record.draws) { // draws in place (dropout masks) read nothing but the generator
    record.form = Form::FIXED;
    record.root = !op.mutates;
  } else if (op.has(COMMUNICATES) || op.has(EFFECTS)) {
    record.form = Form::FIXED;
    record.root = true;
  } else if (op.has(VALUE)) {
    record.form = Form::VALUE;
  } else if (op.mutates) {
    record.form = Form::WRITE;
    for (const int32_t number : record.written) {
      record.root = record.root || storages.is_given(number);
    }
  }
  if (op.has(RESHAPES)) {
    opaque |= RESHAPED;
  }
  if (op.has(BLANK)) {
    for (const int32_t number : record.made) {
      blank_[number] = storages.nbytes(number) > 0;
    }
  } else {
    for (const int32_t number : record.written) {
      blank_[number] = false;
    }
  }
}

void Tape::looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results) {
  if (records.size() != before) {
    return;
  }
  if (mutates) {
    opaque |= UNOBSERVED;
  }
  for (const c10::IValue& result : results) {
    each_tensor(result, [&](const at::Tensor& tensor) {
      if (!tensor.has_storage()) {
        opaque |= SUBCLASS;
      }
    });
  }
}

void Tape::close() {
  if (std::find(blank_.begin(), blank_.end(), true) != blank_.end()) {
    opaque |= UNFILLED;
  }
  storages.forget();
}

// -- verification -----------------------------------------------------------------------------------------------------

bool Verifier::begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (cursor_ >= tape_.records.size()) {
    return false;
  }
  const Record& record = tape_.records[cursor_];
  if (record.op != &op || !same(record.inputs, arguments, false)) {
    return false;
  }
  size_t use = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (use < record.inputs.size() && record.inputs[use].position == static_cast<int32_t>(i)) {
      while (use < record.inputs.size() && record.inputs[use].position == static_cast<int32_t>(i)) {
        ++use;
      }
    } else if (!equal(record.arguments[i], arguments[i])) {
      return false;
    }
  }
  return true;
}

bool Verifier::end(c10::ArrayRef<c10::IValue> results) {
  const Record& record = tape_.records[cursor_];
  if (results.size() != record.op->handle.schema().returns().size() || !same(record.outputs, results, true)) {
    return false;
  }
  ++cursor_;
  return true;
}

bool Verifier::same(const std::vector<Use>& uses, c10::ArrayRef<c10::IValue> values, bool made) {
  size_t at = 0;
  bool alike = true;
  each_use(values, [&](int32_t position, int32_t element, const at::Tensor& tensor) {
    if (!alike || at >= uses.size() || !tensor.has_storage()) {
      alike = false;
      return;
    }
    const Use& use = uses[at++];
    int32_t number = storages_.find(tensor);
    const bool fresh = use.storage == static_cast<int32_t>(storages_.size());
    if (fresh && (number < 0 || made)) {
      number = made ? storages_.make(tensor) : storages_.number(tensor);
    }
    alike = number == use.storage && use.position == position && use.element == element && use.geometry.is_of(tensor);
  });
  return alike && at == uses.size();
}

} // namespace memplug
