// What Python sees of tapes: they are added to the module of module.cpp.
#include "tape_module.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <stdexcept>

#include "observer.h"
#include "replay.h"

namespace py = pybind11;

namespace memplug {
namespace {

const at::Tensor& tensor_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("a tensor is needed");
  }
  return THPVariable_Unpack(object.ptr());
}

std::vector<int32_t> storages_of(const std::vector<Use>& uses) {
  std::vector<int32_t> numbers;
  for (const Use& use : uses) {
    numbers.push_back(use.storage);
  }
  return numbers;
}

// A tape and what fills it.
struct Recorded {
  Tape tape;
  std::optional<Observer> observer;

  void begin() {
    observer.emplace(tape);
  }
  void end() {
    observer.reset();
    tape.close();
  }
  int32_t number(const py::handle& tensor) const {
    return tape.storages.find(tensor_of(tensor));
  }
  void save(const py::handle& tensor) {
    saved.push_back(tape.save(tensor_of(tensor)));
  }
  std::vector<Action> actions(const std::unordered_map<size_t, bool>& captured) const {
    std::vector<int32_t> wanted = storages_of(saved);
    return actions_of(tape, captured, wanted);
  }
  py::list restored(const std::unordered_map<size_t, bool>& captured, const py::function& substitute) const {
    const auto found = replay(tape, actions(captured), saved, [&](size_t index) {
      const py::tuple parts = substitute(index);
      Substitute all;
      all.rows = parts[1].cast<int64_t>();
      for (const py::handle& part : parts[0]) {
        all.tensors.push_back(tensor_of(part));
      }
      return all;
    });
    py::list tensors;
    for (const at::Tensor& tensor : found) {
      tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    }
    return tensors;
  }
  std::vector<Use> saved;

  py::list records() const {
    py::list all;
    for (const Record& record : tape.records) {
      all.append(py::make_tuple(
          record.op->name,
          static_cast<int>(record.form),
          record.root,
          storages_of(record.inputs),
          record.made,
          record.written));
    }
    return all;
  }
};

// A tape and what is compared with it.
struct Verified {
  explicit Verified(std::shared_ptr<Recorded> tape) : recorded(std::move(tape)), verifier(recorded->tape) {}
  std::shared_ptr<Recorded> recorded;
  Verifier verifier;
  std::optional<Observer> observer;
  bool departed = false;

  void begin() {
    observer.emplace(verifier);
  }
  void end() {
    departed = observer->departed();
    observer.reset();
  }
};

} // namespace

void add_tapes(py::module_& module) {
  module.def("describe_operators", [](py::object describe) {
    // never destroyed: operators are looked up by threads that outlive Python
    auto* kept = new py::object(std::move(describe));
    describe_operators([kept](const std::string& name, const std::string& overload) {
      const py::gil_scoped_acquire locked;
      return (*kept)(name, overload).cast<uint32_t>();
    });
  });
  py::class_<Recorded, std::shared_ptr<Recorded>>(module, "Tape")
      .def(py::init<>())
      .def("begin", &Recorded::begin)
      .def("end", &Recorded::end)
      .def("number", &Recorded::number)
      .def("save", &Recorded::save)
      .def(
          "actions",
          [](const Recorded& r, const std::unordered_map<size_t, bool>& captured) {
            std::vector<int> all;
            for (const Action action : r.actions(captured)) {
              all.push_back(static_cast<int>(action));
            }
            return all;
          })
      .def("restored", &Recorded::restored)
      .def("records", &Recorded::records)
      .def_property_readonly("opaque", [](const Recorded& r) { return r.tape.opaque; });
  py::class_<Verified>(module, "Verification")
      .def(py::init<std::shared_ptr<Recorded>>())
      .def("begin", &Verified::begin)
      .def("end", &Verified::end)
      .def_readonly("departed", &Verified::departed)
      .def_property_readonly("verified", [](const Verified& v) { return v.verifier.verified(); });
}

} // namespace memplug
