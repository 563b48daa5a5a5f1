#include "exchange.h"

#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <utility>

namespace memplug {
namespace {

bool (*sees_operators)() = nullptr;
torch::Library* standing = nullptr; // never freed: operators run until the process ends

// The work object of an exchange that has already ended.
class Finished final : public c10d::Work {
 public:
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  void synchronize() override {}
};

// The object that a tape holds, in a capsule, in place of a process group.
struct KeptGroup final : torch::CustomClassHolder {
  KeptGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& strong, bool was_object)
      : group(strong), is_object(was_object) {}

  // a weak reference, which also keeps another group from getting this address
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  const bool is_object; // the operator got the group as an object; a functional collective gets a capsule instead
};

// Returns the contents of a capsule, or of the capsule in an object; null for an object without one.
c10::intrusive_ptr<torch::CustomClassHolder> held_in(const c10::IValue& value) {
  if (value.isCapsule()) {
    return value.toCapsule();
  }
  const c10::ivalue::Object& object = value.toObjectRef();
  return object.slots().size() == 1 && object.getSlot(0).isCapsule() ? object.getSlot(0).toCapsule() : nullptr;
}

const c10::intrusive_ptr_target* identity_of(const c10::IValue& value) {
  const auto held = held_in(value);
  if (held == nullptr) {
    return &value.toObjectRef();
  }
  const auto* const kept = dynamic_cast<const KeptGroup*>(held.get());
  return kept != nullptr ? kept->group._unsafe_get_target() : held.get();
}

bool is_reduction(const c10::IValue& value) {
  return value.isObject() && value.toObjectRef().type() == c10::getCustomClassType<c10::intrusive_ptr<c10d::ReduceOp>>();
}

c10::intrusive_ptr<c10d::Work> work_in(const c10::IValue& result) {
  return result.isObject() ? result.toCustomClass<c10d::Work>() : nullptr;
}

int64_t async_op_of(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "async_op") {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

// Runs an exchange. On a thread for which `sees_operators` returns true, waits for it if the caller would wait at once
// (`async_op=False`).
void exchange(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const c10::IValue& async_op = (*stack)[stack->size() - schema.arguments().size() + async_op_of(op)];
  const bool is_over = sees_operators() && async_op.isBool() && !async_op.toBool();
  const at::AutoDispatchBelowAutograd below;
  op.callBoxed(stack);
  if (!is_over) {
    return;
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    if (const auto work = work_in((*stack)[i]); work != nullptr) {
      work->wait();
      (*stack)[i] = c10::IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<Finished>()));
    }
  }
}

} // namespace

void wait_for(c10::ArrayRef<c10::IValue> results) {
  for (const c10::IValue& result : results) {
    if (const auto work = work_in(result); work != nullptr) {
      work->wait();
    }
  }
}

c10::IValue kept_object(const c10::IValue& object) {
  const auto group = c10::dynamic_intrusive_pointer_cast<c10d::ProcessGroup>(held_in(object));
  return group == nullptr ? object
                          : c10::IValue::make_capsule(c10::make_intrusive<KeptGroup>(group, object.isObject()));
}

c10::IValue called_with(const c10::IValue& kept) {
  if (!kept.isCapsule()) {
    return kept;
  }
  const auto held = kept.toCapsule();
  const auto* const weak = dynamic_cast<const KeptGroup*>(held.get());
  if (weak == nullptr) {
    return kept;
  }
  auto group = weak->group.lock();
  if (group == nullptr) {
    return {};
  }
  return weak->is_object ? c10::IValue(std::move(group)) : c10::IValue::make_capsule(std::move(group));
}

int64_t rank_in(const c10::IValue& kept) {
  if (kept.isString()) {
    try {
      return c10d::resolve_process_group(kept.toStringRef())->getRank();
    } catch (const c10::Error&) {
      return -1;
    }
  }
  const c10::IValue found = called_with(kept);
  return found.isNone() ? -1 : c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(held_in(found))->getRank();
}

bool same_object(const c10::IValue& one, const c10::IValue& other) {
  if (identity_of(one) == identity_of(other)) {
    return true;
  }
  if (!is_reduction(one) || !is_reduction(other)) {
    return false;
  }
  const auto reduction = one.toCustomClass<c10d::ReduceOp>(), another = other.toCustomClass<c10d::ReduceOp>();
  return reduction->op_ == another->op_ && reduction->supplement_ == another->supplement_;
}

void stand_before_exchanges(bool (*is_watched)()) {
  sees_operators = is_watched;
  standing = new torch::Library(torch::Library::IMPL, "c10d", std::nullopt, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.getNamespace() == "c10d" && op.has_value() && async_op_of(*op) >= 0) {
      for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
        standing->impl(
            name.name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&exchange>()));
      }
    }
  }
}

void leave_exchanges() {
  delete std::exchange(standing, nullptr);
}

} // namespace memplug

#else // a torch without c10d

namespace memplug {

void wait_for(c10::ArrayRef<c10::IValue>) {}

c10::IValue kept_object(const c10::IValue& object) {
  return object;
}

c10::IValue called_with(const c10::IValue& kept) {
  return kept;
}

int64_t rank_in(const c10::IValue&) {
  return -1;
}

bool same_object(const c10::IValue& one, const c10::IValue& other) {
  return one.is(other);
}

void stand_before_exchanges(bool (*)()) {}

void leave_exchanges() {}

} // namespace memplug

#endif
