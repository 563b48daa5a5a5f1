#include "place_hooks.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "clock.h"
#include "input_sizes.h"

namespace py = pybind11;

namespace memplug {
namespace {

constexpr int32_t IN_MODEL = -1, IN_OPTIMIZER = -2, IN_ENGINE_STEP = -3; // other values are indices of layers

// Stack of the forwards, layers, optimizer and engine step that the training thread is in. Each entry has the place to
// which the thread returns when it leaves.
class PlaceHooks {
 public:
  void enter(int32_t what, Place former) {
    entered_.emplace_back(what, former);
  }

  // Leaves `what`, and everything that was entered inside of it and not left because of an error. Does nothing if an
  // error has prevented that `what` was entered.
  void leave(int32_t what) {
    const auto found =
        std::find_if(entered_.rbegin(), entered_.rend(), [what](const auto& entry) { return entry.first == what; });
    if (found != entered_.rend()) {
      memplug::leave(found->second);
      entered_.erase(std::prev(found.base()), entered_.end());
    }
  }

  void clear() {
    entered_.clear();
  }

 private:
  std::vector<std::pair<int32_t, Place>> entered_;
};

struct LayerHook {
  std::shared_ptr<PlaceHooks> hooks;
  int32_t layer;
};

LayerHook& hook_of(PyObject* capsule) {
  return *static_cast<LayerHook*>(PyCapsule_GetPointer(capsule, nullptr));
}

template <typename Act>
PyObject* done(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* enter_hook(PyObject* self, PyObject* const*, Py_ssize_t) {
  LayerHook& hook = hook_of(self);
  return done([&] { hook.hooks->enter(hook.layer, enter_layer(hook.layer)); });
}

PyObject* leave_hook(PyObject* self, PyObject* const*, Py_ssize_t) {
  LayerHook& hook = hook_of(self);
  return done([&] { hook.hooks->leave(hook.layer); });
}

PyMethodDef enter_method = {
    "enter_layer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(enter_hook)), METH_FASTCALL, nullptr};
PyMethodDef leave_method = {
    "leave_layer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave_hook)), METH_FASTCALL, nullptr};

py::tuple layer_hooks(const std::shared_ptr<PlaceHooks>& hooks, int32_t layer) {
  const py::capsule hook(new LayerHook{hooks, layer}, [](void* made) { delete static_cast<LayerHook*>(made); });
  return py::make_tuple(
      py::reinterpret_steal<py::object>(PyCFunction_New(&enter_method, hook.ptr())),
      py::reinterpret_steal<py::object>(PyCFunction_New(&leave_method, hook.ptr())));
}

} // namespace

void add_place_hooks(py::module_& module) {
  module.def("input_sizes", [] { return input_sizes(); });
  py::class_<PlaceHooks, std::shared_ptr<PlaceHooks>>(module, "PlaceHooks")
      .def(py::init<>())
      .def(
          "enter_forward",
          [](PlaceHooks& hooks, int32_t number, std::vector<int64_t> sizes) {
            note_input_sizes(number, std::move(sizes));
            hooks.enter(IN_MODEL, enter_forward(number));
          })
      .def("enter_no_grad", [](PlaceHooks& hooks) { hooks.enter(IN_MODEL, enter_no_grad()); })
      .def("enter_recompute", [](PlaceHooks& hooks) { hooks.enter(IN_MODEL, enter_layer(-1)); })
      .def("leave_model", [](PlaceHooks& hooks) { hooks.leave(IN_MODEL); })
      .def("enter_optimizer", [](PlaceHooks& hooks) { hooks.enter(IN_OPTIMIZER, enter_optimizer()); })
      .def("leave_optimizer", [](PlaceHooks& hooks) { hooks.leave(IN_OPTIMIZER); })
      .def("enter_engine_step", [](PlaceHooks& hooks) { hooks.enter(IN_ENGINE_STEP, enter_optimizer()); })
      .def("leave_engine_step", [](PlaceHooks& hooks) { hooks.leave(IN_ENGINE_STEP); })
      .def("layer_hooks", &layer_hooks)
      .def("clear", &PlaceHooks::clear);
}

} // namespace memplug
