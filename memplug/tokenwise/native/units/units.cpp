// Runs the units (unit.h) of a frame, in its forward and in recompute passes.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <set>

#include "calls.h"
#include "clock.h"
#include "layouts.h"
#include "running.h"
#include "saved_type.h"
#include "torch_private_csrc.h"
#include "versions.h"

namespace py = pybind11;

// Operators that stand for units and their parts on tapes. They have no kernels, since nothing calls them.
TORCH_LIBRARY(memplug, library) {
  for (const char* const overload : {"", ".shared"}) {
    library.def((std::string("unit") + overload + "(Tensor[] given, str name) -> Tensor").c_str());
  }
  // `written`: those tensors of `given` that the unit writes to
  library.def("unit_(Tensor[] given, str name, Tensor(a!)[] written) -> Tensor");
  for (const char* const overload :
       {"", ".rows", ".whole", ".attention", ".choice", ".shared", ".whole_shared", ".attention_shared", ".exchange"}) {
    library.def((std::string("of_unit") + overload + "(Tensor unit, int ordinal) -> Tensor").c_str());
  }
}

namespace memplug {
namespace {

thread_local Running* observed_now = nullptr;

const Operator& named(const char* name, const std::string& overload) {
  const Operator* const op = operator_named(name, overload);
  TORCH_INTERNAL_ASSERT(op != nullptr, "memplug: no operator ", name, ".", overload);
  return *op;
}

// The input tensors of a unit: its tensor arguments that a tape can describe, except parameters.
struct UnitInputs {
  std::vector<at::Tensor> tensors, written; // all inputs, and those that the unit's operator writes to
  std::vector<size_t> ordinals; // for each input, its position among the call's tensor arguments, parameters included
};

// Returns the input tensors of a call, and stores all of its arguments in `made`.
UnitInputs inputs_of(UnitCall& made, const py::tuple& arguments, const py::dict& keywords) {
  UnitInputs given;
  const auto writes = calls().unit.writes(made.unit);
  size_t ordinal = 0;
  const auto note = [&](py::handle value) {
    const bool is_tensor = THPVariable_Check(value.ptr()) && is_plain(tensor_of(value));
    if (is_tensor && !is_parameter(tensor_of(value))) {
      const at::Tensor& tensor = tensor_of(value);
      given.tensors.push_back(tensor);
      given.ordinals.push_back(ordinal);
      made.types.push_back(type_of(value));
      made.requires_grad.push_back(tensor.requires_grad());
      made.written.push_back(writes.count(ordinal) > 0);
      if (made.written.back()) {
        given.written.push_back(tensor);
      }
      made.values.emplace_back();
    } else {
      made.values.push_back(py::reinterpret_borrow<py::object>(value));
      if (is_tensor) {
        made.parameters.push_back(tensor_of(value));
        made.versions.push_back(version_of(tensor_of(value)));
      }
    }
    ordinal += is_tensor ? 1 : 0;
  };
  made.arguments = Containers::of(arguments, note);
  made.keywords = Containers::of(keywords, note);
  return given;
}

} // namespace

at::Tensor no_leaf_at(const at::Tensor& memory) {
  const at::AutoGradMode with_gradients(true);
  at::Tensor tensor = at::empty({0}, memory.options()).set_requires_grad(true).clone();
  tensor.set_data(memory);
  return tensor;
}

std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(version_of(tensor));
  }
  return versions;
}

std::vector<at::Tensor> tensors_in(py::handle returned) {
  std::vector<at::Tensor> tensors;
  Containers::of(returned, [&](py::handle value) {
    if (THPVariable_Check(value.ptr()) && is_plain(tensor_of(value))) {
      tensors.push_back(tensor_of(value));
    }
  });
  return tensors;
}

const Operator& unit_operator(const std::string& overload, bool writes) {
  const Operator& part = part_operator(overload);
  const bool shared = part.has(SHARED) || part.has(COLLECTIVE);
  return named(writes ? "memplug::unit_" : "memplug::unit", shared && !writes ? "shared" : "");
}

const Operator& part_operator(const std::string& overload) {
  return named("memplug::of_unit", overload);
}

void Running::begin() {
  observer_.emplace(forward);
  outer_ = std::exchange(observed_now, this);
}

void Running::end() {
  if (observer_.has_value()) {
    observer_.reset();
    observed_now = std::exchange(outer_, nullptr);
    if (observed_now != nullptr) {
      observed_now->forward.read(forward);
    }
  }
}

Running* Running::observed() {
  return Observer::is_noting() ? observed_now : nullptr;
}

Running* Running::current() {
  return observed_now;
}

py::object Running::run_unit(
    py::object unit,
    const std::string& overload,
    const std::string& name,
    py::object state,
    py::object its_surroundings,
    const py::object& call,
    const py::tuple& arguments,
    const py::dict& keywords) {
  const Pause unseen;
  UnitCall made{
      std::move(unit),
      call,
      std::move(state),
      std::move(its_surroundings),
      Ambient(flow->device),
      at::GradMode::is_enabled()};
  const bool writes_unsaid = calls().unit.writes_unsaid(made.unit);
  const UnitInputs given = inputs_of(made, arguments, keywords);
  std::vector<at::Tensor> reads;
  for (const py::handle parameter : calls().unit.reads(made.unit)) {
    reads.push_back(tensor_of(parameter));
  }
  for (const auto* const parameters : {&made.parameters, &reads}) {
    for (const at::Tensor& parameter : *parameters) {
      forward.read_in_unit(parameter);
    }
  }
  const size_t index = forward.begun(), saved = forward.saved.size();
  const auto versions = versions_of(given.tensors);
  if (writes_unsaid && forward.followed() == nullptr) { // this call may write to more inputs than earlier calls did
    const Suspension own;
    forward.protect(given.tensors);
  }
  std::vector<c10::IValue> described{c10::List<at::Tensor>(given.tensors), name};
  if (!given.written.empty()) {
    described.emplace_back(c10::List<at::Tensor>(given.written));
  }
  forward.begin_unit(unit_operator(overload, !given.written.empty()), described);
  py::object out = py::reinterpret_steal<py::object>(PyObject_Call(call.ptr(), arguments.ptr(), keywords.ptr()));
  if (!out) {
    py::error_already_set error;
    forward.fail_unit();
    throw error;
  }
  const auto returned = tensors_in(out);
  const auto unforeseen =
      forward.written_unseen(index, given.tensors, versions, {}, writes_unsaid ? returned : std::vector<at::Tensor>());
  made.saved = forward.saved.size() - saved;
  for (size_t i = 0; i < made.parameters.size(); ++i) {
    if (version_of(made.parameters[i]) != made.versions[i]) {
      forward.fail_unit();
      throw Failure(Failure::GIVEN_WAS_WRITTEN, made.parameters[i].sizes());
    }
  }
  for (const at::Tensor& parameter : reads) {
    made.parameters.push_back(parameter);
    made.versions.push_back(version_of(parameter));
  }
  const Suspension own;
  if (!calls().unit.puts_back(made.unit)) {
    made.ambient.forget_undrawn();
  }
  const at::Tensor token = at::empty({0}, at::TensorOptions(at::kByte));
  const auto lasting = tensors_in(calls().unit.lasting(made.unit));
  made.parts = forward.end_unit(part_operator(overload), token, returned, lasting);
  const py::object ran = made.unit;
  units_.emplace(index, std::move(made));
  if (!unforeseen.empty()) {
    std::vector<size_t> numbers;
    for (const size_t each : unforeseen) {
      numbers.push_back(given.ordinals[each]);
    }
    calls().unit.note_writes(ran, numbers);
    forward.blind_to_writes(given.tensors, unforeseen);
  }
  return out;
}

std::vector<at::Tensor> Running::run_unit_again(
    size_t index, const std::vector<at::Tensor>& given, const std::vector<bool>& needed) {
  const UnitCall& unit = units_.at(index);
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    check_version(unit.parameters[i], unit.versions[i], "parameter that a unit of its region reads");
  }
  size_t value = 0, tensor = 0;
  const auto next = [&]() -> py::object {
    const py::object& kept = unit.values.at(value++);
    if (kept) {
      return kept;
    }
    const at::Tensor memory = given.at(tensor).detach();
    const bool requires_grad = unit.requires_grad.at(tensor), written = unit.written.at(tensor);
    return wrapped_as(
        unit.types.at(tensor++),
        requires_grad && written ? no_leaf_at(memory) : memory.set_requires_grad(requires_grad));
  };
  py::object arguments = unit.arguments.around(next), keywords = unit.keywords.around(next);
  py::list sources;
  for (size_t i = 0; i < needed.size(); ++i) {
    sources.append(needed[i] ? py::object(py::make_tuple(unit.parts[i].saved, unit.parts[i].ordinal)) : py::none());
  }
  const bool as_then = unit.ambient.holds() && py::len(unit.surroundings) == 0;
  const at::AutoGradMode with_gradients(unit.with_gradients);
  const py::list found = calls().executor.run_unit_again(
      executor_,
      unit.unit,
      region_object_,
      unit.call,
      arguments,
      keywords,
      unit.state,
      unit.surroundings,
      as_then ? py::object(py::none()) : py::object(unit.ambient.described()),
      sources,
      unit.saved);
  std::vector<at::Tensor> parts;
  for (const py::handle part : found) {
    parts.push_back(part.is_none() ? at::Tensor() : Forward::whole(tensor_of(part)));
  }
  return parts;
}

py::list Running::unit_states() const {
  py::list states;
  for (const auto& [index, unit] : units_) {
    states.append(py::make_tuple(unit.unit, unit.state));
  }
  return states;
}

} // namespace memplug
