#include "observer.h"

#include <memory>
#include <utility>

#include "layouts.h"
#include "torch_private.h"

namespace memplug {
namespace {

thread_local Observer* current = nullptr;

// Returns whether operators now run on fake tensors (shapes without memory), as when DTensor infers the sharding of a
// result.
bool is_fake() {
  return DispatchModes::any_modes_set() && DispatchModes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
}

} // namespace

Observer::Observer(Forward& forward) : forward_(forward), outer_(current) {
  current = this;
  if (outer_ != nullptr) { // the outer observer sees no operators until this one is destroyed
    outer_->forward_.blind(NESTED);
  }
  if (!at::isRecordFunctionEnabled()) {
    forward_.blind(UNOBSERVED);
  }
}

Observer::~Observer() {
  current = outer_;
}

void Observer::address_taken(const at::Tensor& tensor) {
  if (is_noting()) {
    current->forward_.blind(UNOBSERVED);
    current->forward_.read(tensor);
  }
}

void Observer::read(const at::Tensor& tensor) {
  if (is_noting()) {
    current->forward_.read(tensor);
  }
}

bool Observer::is_active() {
  return current != nullptr && Pause::depth() == 0;
}

bool Observer::is_noting() {
  return is_active() && !current->inside_;
}

void Observer::end_in_child() {
  if (current == nullptr) {
    silence(FORWARDS);
  }
}

void Observer::rethrow() {
  if (failure_ != nullptr) {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void Observer::fail() {
  if (failure_ == nullptr) {
    failure_ = std::current_exception();
  }
  forward_.blind(FAILED);
}

bool Observer::begin(OperatorCall& call) {
  const at::RecordFunction& function = call.function;
  Observer* const observer = current;
  if (observer == nullptr || Pause::depth() > 0) {
    return false;
  }
  Running running{What::IGNORED, false, 0};
  if (!observer->inside_) {
    if (is_fake()) {
      observer->inside_ = true;
      running.what = What::FAKE;
    } else if (const Operator* const op = operator_of(function); op != nullptr) {
      try {
        running = observer->begin(function, *op);
      } catch (...) {
        observer->inside_ = false;
        observer->fail();
      }
    }
  } else {
    if (observer->leaf_ != nullptr) {
      observer->look_inside(function);
    }
    if (observer->modes_.are_called()) {
      running.inside = observer->modes_.begin_inside(function);
    }
  }
  observer->running_.push_back(running);
  return true;
}

Observer::Running Observer::begin(const at::RecordFunction& function, const Operator& op) {
  const size_t count = op.argument_count;
  if (function.inputs().size() < count) { // torch cannot box its arguments
    forward_.blind(UNOBSERVED);
    return {What::IGNORED, false, 0};
  }
  const auto arguments = function.inputs().slice(function.inputs().size() - count); // the arguments are the last inputs
  bool subclass = false;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.key_set().has(c10::DispatchKey::Python)) {
        subclass = true;
        forward_.meet_subclass(tensor);
      } else if (is_wrapped(tensor)) {
        subclass = true;
        forward_.blind(TRANSFORMED);
      }
    });
  }
  if (op.is_composite(arguments) || subclass || op.casts(arguments)) {
    return {What::THROUGH, op.mutates, forward_.begun()};
  }
  inside_ = true;
  leaf_ = op.hides_nothing || op.has(EXCHANGE) ? nullptr : &op;
  launched_ = pending_ = 0;
  forward_.begin(op, arguments);
  modes_.begin(op, arguments);
  return {What::LEAF, false, 0};
}

// Counts the collectives that the running leaf launches and waits for, if it is another library's operator. If it
// launches any, then in a recompute pass either all ranks must run it again, or none.
void Observer::look_inside(const at::RecordFunction& function) {
  const Operator* const op = operator_of(function);
  if (op == nullptr) {
    return;
  }
  if (op->has(COMMUNICATES)) {
    const auto inputs = function.inputs();
    const size_t count = op->argument_count;
    const bool is_over = inputs.size() >= count && op->is_over(inputs.slice(inputs.size() - count));
    ++launched_;
    pending_ += is_over ? 0 : 1;
  } else if (op->has(WAITS)) {
    --pending_;
  }
}

void Observer::note_exchanges(c10::ArrayRef<c10::IValue> results) {
  const Operator* const leaf = std::exchange(leaf_, nullptr);
  if (leaf == nullptr || launched_ == 0) {
    return;
  }
  size_t tensors = 0;
  for (const c10::IValue& result : results) {
    each_tensor(result, [&](const at::Tensor&) { ++tensors; });
  }
  leaf->note_exchange(pending_ <= 0 && !leaf->mutates && tensors > 0);
}

void Observer::end(OperatorCall& call) {
  const at::RecordFunction& function = call.function;
  Observer* const observer = current;
  if (observer == nullptr || observer->running_.empty()) {
    return; // the operator began under another observer
  }
  const Running running = observer->running_.back();
  observer->running_.pop_back();
  try {
    if (running.what == What::LEAF) {
      observer->note_exchanges(function.outputs());
      if (observer->modes_.are_called() && !observer->modes_.end(function.outputs())) {
        observer->forward_.blind(CHANGED);
      }
      observer->forward_.end(function.outputs());
    } else if (running.inside && observer->modes_.are_called()) {
      observer->modes_.end_inside(*running.inside, function.outputs());
    } else if (running.what == What::THROUGH && !observer->inside_) {
      observer->forward_.looked_through(running.before, running.mutates, function.outputs());
    }
  } catch (...) {
    observer->fail();
  }
  if (running.what == What::LEAF || running.what == What::FAKE) {
    observer->inside_ = false;
  }
}

} // namespace memplug
