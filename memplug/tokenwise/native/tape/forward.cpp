#include "forward.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <mutex>

#include "exchange.h"
#include "layouts.h"
#include "transfer.h"

namespace memplug {
namespace {

// Returns the generators that an operator may draw from, with their present states: the generator among the arguments,
// or, if there is none, the default generators of the CPU and of the tensors' device. If all tensors are on the CPU,
// the current device stands in for the tensors' device.
std::vector<GeneratorDraw> generators_of(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Generator> generators;
  std::optional<c10::Device> device;
  for (const c10::IValue& argument : arguments) {
    if (argument.isGenerator()) {
      generators = {argument.toGenerator()};
      break;
    }
    each_tensor(argument, [&](const at::Tensor& tensor) { device = tensor.is_cpu() ? device : tensor.device(); });
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
  std::vector<GeneratorDraw> drawn;
  for (at::Generator& generator : generators) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    drawn.push_back({generator, generator.get_state()});
  }
  return drawn;
}

// Returns the reason why no tape can describe a tensor, as a bit of `Opaque`; 0 if a tape can.
uint32_t reasons_of(const at::Tensor& tensor) {
  if (is_wrapped(tensor)) {
    return TRANSFORMED;
  }
  return is_irregular(tensor) ? IRREGULAR : tensor.has_storage() ? 0 : SUBCLASS;
}

} // namespace

Forward::Forward(
    std::vector<std::shared_ptr<const Tape>> known,
    Listener* listener,
    Storages::Regathered regathered,
    std::shared_ptr<Ledger> ledger)
    : storages(regathered), known_(std::move(known)), listener_(listener), ledger_(std::move(ledger)) {
  if (known_.empty()) {
    noted_ = std::make_shared<Tape>();
  } else {
    followed_ = known_.front();
    const size_t count = followed_->nbytes.size();
    storages.reserve(count);
    given.reserve(count);
    captured_.reserve(count);
    saved.reserve(followed_->saves.size());
  }
}

// -- storages ---------------------------------------------------------------------------------------------------------

int32_t Forward::number(const at::Tensor& tensor, bool is_given) {
  own_.push_back(false);
  counted_.push_back(false);
  given.emplace_back();
  captured_.emplace_back();
  return storages.add(tensor, is_given);
}

int32_t Forward::meet(const at::Tensor& tensor, size_t met) {
  int32_t storage = storages.find(tensor);
  if (storage < 0) {
    storage = number(tensor, true);
    give(storage, tensor, met);
  } else if (GivenMemory& memory = given[storage]; memory.tensor.defined()) {
    count(memory, tensor, met);
  }
  return storage;
}

int32_t Forward::enter(const at::Tensor& tensor, bool captured) {
  int32_t storage = storages.find(tensor);
  if (storage < 0) {
    storage = number(tensor, true);
    entered_ = storage + 1;
    if (!captured) {
      give(storage, tensor, 0);
    }
  }
  return storage;
}

void Forward::give(int32_t storage, const at::Tensor& tensor, size_t met) {
  if (!given[storage].tensor.defined()) {
    // hold a parameter itself, since code that shards parameters exchanges their memory; hold any other tensor without
    // its graph, which may refer back to this forward
    const bool itself = storages.regathered[storage] || (tensor.is_leaf() && tensor.requires_grad());
    given[storage].tensor = itself ? tensor : alias_of(tensor);
    given[storage].had_gradient = itself && tensor.is_leaf() && tensor.grad().defined();
  }
  count(given[storage], tensor, met);
}

void Forward::set_captured(int32_t storage, bool whole, bool kept, at::ScalarType dtype) {
  captured_[storage] = {whole ? WHOLE : PART, kept, dtype};
  if (counted_[storage]) {
    pending_bytes -= storages.nbytes[storage];
    kept_bytes += kept ? storages.nbytes[storage] : 0;
  }
}

// -- operators --------------------------------------------------------------------------------------------------------

void Forward::find_arguments(c10::ArrayRef<c10::IValue> arguments) {
  found_.clear();
  each_use(arguments, [&](ArgumentPath path, const at::Tensor& tensor) {
    const uint32_t reasons = reasons_of(tensor);
    if ((reasons & ~IRREGULAR) != 0) {
      opaque_ |= reasons;
      return;
    }
    found_.push_back({path, meet(tensor, begun_ + 1), &tensor});
  });
}

bool Forward::find_results(c10::ArrayRef<c10::IValue> results, const Record& record) {
  found_.clear();
  made_.clear();
  bool all = true;
  each_use(results, [&](ArgumentPath path, const at::Tensor& tensor) {
    const uint32_t reasons = reasons_of(tensor);
    all = all && reasons == 0;
    opaque_ |= reasons;
    if ((reasons & ~IRREGULAR) != 0) {
      return;
    }
    int32_t storage = storages.find(tensor);
    if (!record.reads(storage) && std::find(made_.begin(), made_.end(), storage) == made_.end()) {
      const bool early = std::any_of(
          saved_early_.begin(), saved_early_.end(), [&](const auto& saved) { return saved.first == storage; });
      storage = early ? storage : number(tensor, false);
      made_.push_back(storage);
    }
    found_.push_back({path, storage, &tensor});
  });
  return all;
}

bool Forward::is_same_uses(const std::vector<Use>& uses) const {
  return std::equal(uses.begin(), uses.end(), found_.begin(), found_.end(), [&](const Use& use, const FoundTensor& found) {
    return use.storage == found.storage && use.path == found.path &&
        use.geometry.is_of(*found.tensor, storages.origins[found.storage]);
  });
}

bool Forward::is_same(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const Record& record) const {
  if (record.op != &op || record.with_gradients != c10::GradMode::is_enabled() || record.arguments.size() != arguments.size() || !is_same_uses(record.inputs)) {
    return false;
  }
  auto use = record.inputs.begin();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto next = use;
    while (use != record.inputs.end() && use->path.position == static_cast<int32_t>(i)) {
      ++use;
    }
    if (use == next && !equal(record.arguments[i], arguments[i])) {
      return false;
    }
  }
  return true;
}

Record Forward::note(const Operator& op, c10::ArrayRef<c10::IValue> arguments) const {
  Record record{};
  record.op = &op;
  record.draws = op.draws(arguments);
  record.with_gradients = c10::GradMode::is_enabled();
  record.arguments.reserve(arguments.size());
  for (const c10::IValue& argument : arguments) {
    record.arguments.push_back(without_tensors(argument));
  }
  for (const FoundTensor& found : found_) {
    record.inputs.push_back({found.path, found.storage, Geometry::of(*found.tensor, storages.origins[found.storage])});
    if (op.writes_to(found.path.position, arguments)) {
      record.written.push_back(found.storage);
    }
  }
  return record;
}

// Throws if an operator is about to write to an irregular tensor (layouts.h) in given memory. memplug cannot save its
// value first, so a recompute pass would find the forward's writes in it.
void Forward::check_writes(const Record& record) const {
  for (const FoundTensor& found : found_) {
    if (record.writes(found.storage) && storages.given[found.storage] && is_irregular(*found.tensor)) {
      throw Failure(Failure::IRREGULAR_WAS_WRITTEN, {});
    }
  }
}

void Forward::note_results(Record& record) const {
  record.outputs.clear();
  for (const FoundTensor& found : found_) {
    record.outputs.push_back({found.path, found.storage, Geometry::of(*found.tensor, storages.origins[found.storage])});
  }
  record.made = made_;
}

void Forward::begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  find_arguments(arguments);
  if (followed_ != nullptr) {
    const bool same =
        begun_ < followed_->records.size() && is_same(op, arguments, followed_->records[begun_]);
    if (!same && !follow_another(op, arguments)) {
      depart(begun_);
    }
  }
  if (followed_ == nullptr) {
    noted_->records.push_back(note(op, arguments));
  }
  const Record& record = tape().records[begun_];
  check_writes(record);
  if (record.draws) {
    drawn.push_back(generators_of(arguments));
  }
  const size_t index = begun_++;
  running_ = true;
  listener_->note_stream();
  for (const FoundTensor& found : found_) {
    listener_->note_use(*found.tensor);
  }
  if (op.reads_elements && op.hides_nothing) {
    listener_->note_reads(record);
  }
  exchanged_.clear();
  if (!record.written.empty()) {
    for (const FoundTensor& found : found_) {
      if (op.has(EXCHANGE) && record.writes(found.storage)) {
        exchanged_.emplace_back(*found.tensor);
      }
    }
    for (size_t i = 0; i < found_.size(); ++i) { // the listener's operators are not noted, so `found_` does not change
      const FoundTensor found = found_[i];
      const bool is_foreign = storages.given[found.storage] && !own_[found.storage];
      if (record.writes(found.storage) && (is_captured(found.storage) || is_foreign)) {
        own_[found.storage] = true;
        listener_->before_write(found.storage, *found.tensor);
        captured_[found.storage] = {};
      }
    }
  }
  if (listener_->is_timed) {
    listener_->time(index, false);
  }
}

void Forward::end(c10::ArrayRef<c10::IValue> results) {
  const size_t index = begun_ - 1;
  running_ = false;
  const Operator& op = *tape().records[index].op;
  if (op.reads_elements && !op.hides_nothing) { // a unit, or another library's operator, may have waited for a stream
    listener_->note_reads(tape().records[index]);
  }
  if (listener_->is_timed) {
    listener_->time(index, true);
  }
  const bool failed = results.size() != op.result_count;
  const bool nameable = find_results(results, tape().records[index]);
  if (followed_ != nullptr && (failed || !is_same_uses(followed_->records[index].outputs))) {
    depart(begun_);
  }
  if (failed) {
    opaque_ |= FAILED;
  }
  if (followed_ == nullptr) {
    note_results(noted_->records[index]);
    classify(noted_->records[index]);
  }
  for (const auto& [storage, tensor] : saved_early_) {
    if (std::find(made_.begin(), made_.end(), storage) == made_.end()) {
      // the tensor is not a result, but for instance a copy of memory that is about to be overwritten: hold it as given
      storages.given[storage] = true;
      give(storage, tensor, begun_);
    }
  }
  saved_early_.clear();
  if (op.has(LIFTS) && !failed && !results.empty()) {
    lift(index, results.front().toTensor());
  }
  const bool over = op.is_over(tape().records[index].arguments);
  if (over) {
    wait_for(results); // operators that the back end runs meanwhile are not noted
  }
  if (!failed && nameable && (over || !op.has(EXCHANGE)) && listener_->wants(index, op) && !copies_blank(index)) {
    listener_->capture(index, op.has(EXCHANGE) ? exchanged_ : results);
  }
}

void Forward::classify(Record& record) {
  const Operator& op = *record.op;
  record.form = record.made.empty() ? Form::VIEW : Form::PURE;
  if (op.has(PART_OF_UNIT) || (op.has(UNIT) && record.written.empty())) {
    return; // a unit may draw or communicate: if a part has to be recomputed, the unit runs again, and does both again
  }
  if (op.has(EXCHANGE)) {
    record.form = Form::EXCHANGE;
    record.root = true;
    record.made = record.written;
  } else if (record.draws) { // if it draws in place, as for a dropout mask, it reads nothing but the generator
    record.form = Form::FIXED;
    record.root = !op.mutates;
  } else if (op.has(COMMUNICATES) || op.has(EFFECTS)) {
    record.form = Form::FIXED;
    record.root = true;
  } else if (op.has(VALUE)) {
    record.form = Form::VALUE;
  } else if (op.mutates && (record.made.empty() || !record.written.empty())) { // the call writes to an argument
    record.form = Form::WRITE;
    for (const int32_t storage : record.written) {
      record.root = record.root || storages.given[storage];
    }
  }
  if (op.has(RESHAPES)) {
    opaque_ |= RESHAPED;
  }
  if (op.has(DUAL)) {
    opaque_ |= TRANSFORMED;
  }
}

void Forward::looked_through(size_t before, bool mutates, c10::ArrayRef<c10::IValue> results) {
  if (begun_ != before) {
    return;
  }
  if (mutates) {
    blind(UNOBSERVED);
  }
  for (const c10::IValue& result : results) {
    each_tensor(result, [&](const at::Tensor& tensor) {
      opaque_ |= reasons_of(tensor);
    });
  }
}

} // namespace memplug
