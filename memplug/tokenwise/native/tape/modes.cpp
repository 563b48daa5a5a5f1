#include "modes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "tape.h"
#include "torch_private.h"

namespace memplug {
namespace {

// Returns whether both tensors wrap the same Python number: torch passes it to modes as a number, and then wraps it
// again.
bool is_same_number(const at::Tensor& one, const at::Tensor& other) {
  return is_number(one) && is_number(other) && one.scalar_type() == other.scalar_type() &&
      std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.itemsize()) == 0;
}

// Returns whether `other` is `one` with lazy conjugation and negation carried out, as torch may do before it calls
// modes.
bool is_resolved(const at::Tensor& one, const at::Tensor& other) {
  if ((!one.is_conj() && !one.is_neg()) || one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) {
    return false;
  }
  const at::RecordFunctionGuard unseen(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard modes(c10::DispatchKey::Python);
  return at::equal(one, other);
}

bool is_itself(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other) || (one.defined() && other.defined() && (is_same_number(one, other) || is_resolved(one, other)));
}

bool is_absent(const c10::IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

bool is_same_storage(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other) || (one.has_storage() && other.has_storage() && one.is_alias_of(other));
}

bool is_same_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other) ||
      (one.defined() && other.defined() && one.has_storage() && other.has_storage() && one.is_alias_of(other) &&
       one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
       one.storage_offset() == other.storage_offset());
}

template <typename Same>
bool are_same(const c10::IValue& one, const c10::IValue& other, const Same& same) {
  if (is_absent(one) && is_absent(other)) {
    return true;
  }
  if (one.isTensor() || other.isTensor()) {
    return one.isTensor() && other.isTensor() && same(one.toTensor(), other.toTensor());
  }
  if (!one.isList() || !other.isList()) {
    return equal(one, other);
  }
  const auto ones = one.toListRef(), others = other.toListRef();
  return std::equal(ones.begin(), ones.end(), others.begin(), others.end(), [&](const auto& each, const auto& its) {
    return are_same(each, its, same);
  });
}

// Returns whether two arguments may differ only because torch omitted or filled in the default for a new tensor's
// dtype, layout, device or pinning.
bool is_default(const Operator& op, size_t position, const c10::IValue& one, const c10::IValue& other) {
  const std::string& name = op.handle.schema().arguments()[position].name();
  return (one.isNone() || other.isNone()) &&
      (name == "dtype" || name == "layout" || name == "device" || name == "pin_memory");
}

bool is_called_alike(const Operator& op, c10::ArrayRef<c10::IValue> ones, c10::ArrayRef<c10::IValue> others) {
  for (size_t i = 0; i < ones.size(); ++i) {
    if (!are_same(ones[i], others[i], is_itself) && !is_default(op, i, ones[i], others[i])) {
      return false;
    }
  }
  return true;
}

// Returns whether each result lies in an argument's memory.
bool returns_arguments(c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
  bool all = true;
  for (const c10::IValue& result : results) {
    each_tensor(result, [&](const at::Tensor& tensor) {
      bool found = false;
      for (const c10::IValue& argument : arguments) {
        each_tensor(argument, [&](const at::Tensor& given) {
          found = found || is_same_storage(given, tensor);
        });
      }
      all = all && found;
    });
  }
  return all;
}

template <typename Mode>
bool is_same_object(const Mode& one, const Mode& other) {
  return one.ptr(&one.pyinterpreter()) == other.ptr(&other.pyinterpreter());
}

} // namespace

bool Modes::around() {
  return DispatchModes::any_modes_set(/*skip_infra_modes=*/true) &&
      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python); // with the key excluded, torch calls no modes
}

void Modes::begin(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  called_.reset();
  if (around()) {
    called_.emplace(CalledOperator{&op, arguments.vec(), DispatchModes::stack_len()});
  }
}

Modes::Inside Modes::begin_inside(const at::RecordFunction& function) {
  const Operator* const op = operator_of(function);
  if (op == nullptr || called_->beside || called_->open == called_->modes) {
    return Inside::WITHIN; // a profiler's label, or an operator that another operator calls
  }
  called_->any = true;
  const auto inputs = function.inputs();
  const size_t count = op->argument_count;
  if (op == called_->op && inputs.size() >= count &&
      is_called_alike(*op, called_->arguments, inputs.slice(inputs.size() - count))) {
    ++called_->open;
    called_->writes = called_->writes || called_->made.has_value();
    return Inside::HANDED_ON;
  }
  called_->writes = called_->writes || (op->mutates && touches(inputs));
  called_->beside = true;
  return Inside::BESIDE;
}

void Modes::end_inside(Inside inside, c10::ArrayRef<c10::IValue> results) {
  if (inside == Inside::BESIDE) {
    called_->beside = false;
  } else if (inside == Inside::HANDED_ON) {
    --called_->open;
    if (!called_->made) {
      called_->made = results.vec();
    }
  }
}

// Returns whether one of these tensors lies in memory of the operator's arguments or results.
bool Modes::touches(c10::ArrayRef<const c10::IValue> values) const {
  bool found = false;
  const auto look = [&](c10::ArrayRef<c10::IValue> others, const at::Tensor& tensor) {
    for (const c10::IValue& other : others) {
      each_tensor(other, [&](const at::Tensor& its) { found = found || is_same_storage(its, tensor); });
    }
  };
  for (const c10::IValue& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      look(called_->arguments, tensor);
      if (called_->made) {
        look(*called_->made, tensor);
      }
    });
  }
  return found;
}

bool Modes::end(c10::ArrayRef<c10::IValue> results) {
  const CalledOperator call = *std::exchange(called_, std::nullopt);
  if (!call.any) { // torch runs some operators, such as detaching a tensor, without calling the modes
    return returns_arguments(call.arguments, results);
  }
  // the back end of a collective writes the result by operators of its own: no mode writes there
  const bool writes = call.writes && !call.op->has(COLLECTIVE);
  return call.made && !writes &&
      std::equal(call.made->begin(), call.made->end(), results.begin(), results.end(), [](const auto& one, const auto& its) {
           const bool are_works = one.isObject() && its.isObject(); // each mode gets a new work object of a collective
           return are_works || are_same(one, its, is_same_memory);
         });
}

ModesAround::ModesAround() {
  if (DispatchModes::any_modes_set(/*skip_infra_modes=*/true)) {
    for (int64_t i = 0; i < DispatchModes::stack_len(); ++i) {
      dispatch_.push_back(DispatchModes::get_stack_at(i));
    }
  }
  for (int64_t i = 0; i < FunctionModes::stack_len(); ++i) {
    functions_.push_back(FunctionModes::get_stack_at(i));
  }
}

ModesAround::Again::Again(const ModesAround& forward) {
  if (DispatchModes::any_modes_set(/*skip_infra_modes=*/true)) {
    dispatch_ = DispatchModes::get_state();
    std::vector<std::shared_ptr<DispatchMode>> now;
    while (DispatchModes::any_modes_set(/*skip_infra_modes=*/true)) {
      now.push_back(DispatchModes::pop_stack());
    }
    std::for_each(now.rbegin(), now.rend(), [&](const auto& mode) {
      if (std::any_of(forward.dispatch_.begin(), forward.dispatch_.end(), [&](const auto& its) {
            return is_same_object(*mode, *its);
          })) {
        DispatchModes::push_non_infra_mode_onto_stack(mode);
      }
    });
  }
  if (FunctionModes::stack_len() > 0 || !forward.functions_.empty()) {
    functions_ = FunctionModes::get_state();
    while (FunctionModes::stack_len() > 0) {
      FunctionModes::pop_stack();
    }
    for (const auto& mode : forward.functions_) {
      FunctionModes::push_onto_stack(mode);
    }
  }
}

ModesAround::Again::~Again() {
  if (dispatch_) {
    DispatchModes::set_state(*dispatch_);
  }
  if (functions_) {
    FunctionModes::set_state(*functions_);
  }
}

} // namespace memplug
