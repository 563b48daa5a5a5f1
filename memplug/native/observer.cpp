#include "observer.h"

#include <memory>

namespace memplug {
namespace {

thread_local Observer* current = nullptr;

// From an operator's beginning to its end.
struct Running final : at::ObserverContext {
  Running(Observer* observer, const Operator* op, bool leaf, size_t index)
      : observer(observer), op(op), leaf(leaf), index(index) {}
  Observer* observer;
  const Operator* op;
  bool leaf;
  size_t index; // of a leaf; else how many the tape had before
};

bool is_subclass(c10::ArrayRef<c10::IValue> arguments) {
  bool found = false;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      found = found || tensor.key_set().has(c10::DispatchKey::Python);
    });
  }
  return found;
}

} // namespace

Observer::Observer(Tape& tape) : tape_(&tape), outer_(current) {
  add_callback();
}

Observer::Observer(Verifier& verifier) : verifier_(&verifier), outer_(current) {
  add_callback();
}

Observer::~Observer() {
  current = outer_;
  if (handle_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle_);
  }
}

void Observer::add_callback() {
  current = this;
  if (outer_ != nullptr) {
    return; // its callback is there
  }
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin, end).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

void Observer::miss() {
  departed_ = verifier_ != nullptr;
  if (tape_ != nullptr) {
    tape_->opaque |= UNOBSERVED;
  }
}

std::unique_ptr<at::ObserverContext> Observer::begin(const at::RecordFunction& function) {
  Observer* const observer = current;
  if (observer == nullptr || observer->inside_ || observer->departed_) {
    return nullptr;
  }
  const Operator* const op = operator_of(function);
  if (op == nullptr) {
    return nullptr;
  }
  const size_t count = op->handle.schema().arguments().size();
  if (function.inputs().size() < count) { // they cannot be boxed
    observer->miss();
    return nullptr;
  }
  const auto arguments = function.inputs().slice(function.inputs().size() - count); // the top of a stack
  const bool subclass = is_subclass(arguments);
  if (subclass && observer->tape_ != nullptr) {
    observer->tape_->opaque |= SUBCLASS;
  }
  if (op->composite || subclass || op->casts(arguments)) {
    const size_t before = observer->tape_ != nullptr ? observer->tape_->records.size() : 0;
    return observer->tape_ != nullptr ? std::make_unique<Running>(observer, op, false, before) : nullptr;
  }
  size_t index = 0;
  if (observer->tape_ != nullptr) {
    index = observer->tape_->begin(*op, arguments);
  } else if (!observer->verifier_->begin(*op, arguments)) {
    observer->departed_ = true;
    return nullptr;
  }
  observer->inside_ = true;
  return std::make_unique<Running>(observer, op, true, index);
}

void Observer::end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* const running = static_cast<Running*>(context);
  if (running == nullptr || running->observer != current) {
    return;
  }
  Observer& observer = *running->observer;
  if (!running->leaf) {
    observer.tape_->looked_through(running->index, running->op->mutates, function.outputs());
    return;
  }
  observer.inside_ = false;
  if (observer.tape_ != nullptr) {
    observer.tape_->end(running->index, function.outputs());
  } else if (!observer.verifier_->end(function.outputs())) {
    observer.departed_ = true;
  }
}

} // namespace memplug
