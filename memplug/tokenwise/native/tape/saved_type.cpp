#include "saved_type.h"

#include <ATen/core/grad_mode.h>

#include "clock.h"
#include "observer.h"
#include "replay.h"
#include "torch_private_csrc.h"
#include "transfer_module.h"
#include "versions.h"

namespace py = pybind11;

namespace memplug {
namespace {

// The object that autograd's graph holds in place of a saved tensor.
struct SavedObject {
  PyObject_HEAD;
  std::shared_ptr<Frame> frame;
  size_t index;
};

void destroy(PyObject* self) {
  auto* const saved = reinterpret_cast<SavedObject*>(self);
  saved->frame->forward.saved[saved->index].alive = false;
  saved->frame->forward.forget(saved->index);
  saved->frame->forward.saved[saved->index].kept.reset();
  saved->frame->forward.saved[saved->index].taken.reset();
  saved->frame.~shared_ptr();
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* saved_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_doc, const_cast<char*>("A saved tensor that memplug restores for backward.")},
      {0, nullptr}};
  static PyType_Spec spec = {"memplug.Saved", sizeof(SavedObject), 0, Py_TPFLAGS_DEFAULT, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// A pack hook's reference to its frame. It is weak, since the hook may outlive the forward: a collective's work object
// copies the thread's state, which includes the hook, and a thread of the process group may destroy that object. A
// frame must not die on that thread.
using Packs = std::weak_ptr<Frame>;

template <typename Call>
PyObject* translated(const Call& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    if (!set_error(error)) {
      torch::translate_exception_to_python(std::current_exception());
    }
  }
  return nullptr;
}

PyObject* pack(PyObject* self, PyObject* tensor) {
  return translated([&]() -> PyObject* {
    const auto frame = static_cast<Packs*>(PyCapsule_GetPointer(self, nullptr))->lock();
    if (frame == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "memplug: a tensor was saved for backward after its region's forward had ended");
      return nullptr;
    }
    Forward& forward = frame->forward;
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    const bool parameter = type == ParameterClass;
    const bool plain = type == THPVariableClass || parameter;
    {
      const Pause paused;
      forward.save(tensor_of(tensor), !plain || (parameter && !forward.storages.regathers()));
    }
    PyTypeObject* const saved = saved_type();
    PyObject* const object = saved->tp_alloc(saved, 0);
    if (object == nullptr) {
      return nullptr;
    }
    auto* const made = reinterpret_cast<SavedObject*>(object);
    new (&made->frame) std::shared_ptr<Frame>(frame);
    made->index = forward.saved.size() - 1;
    return object;
  });
}

PyObject* unpack(PyObject*, PyObject* object) {
  auto* const self = reinterpret_cast<SavedObject*>(object);
  Frame& frame = *self->frame;
  PyObject* const unpacked = translated([&]() -> PyObject* {
    const Forward::Saved& saved = frame.forward.saved[self->index];
    if (saved.written) {
      PyErr_SetString(PyExc_RuntimeError, kWrittenInPlace);
      return nullptr;
    }
    const bool is_itself = saved.way == Forward::Way::HELD || (saved.way == Forward::Way::RECOMPUTED && saved.kept.defined());
    if (is_itself && saved.counter.enabled() && saved.counter.current_version() != saved.version) {
      PyErr_Format(
          PyExc_RuntimeError,
          "%s: it is at version %u; expected version %u",
          kWrittenInPlace,
          saved.counter.current_version(),
          saved.version);
      return nullptr;
    }
    if (!frame.is_over()) {
      return THPVariable_Wrap(frame.early(self->index));
    }
    if (saved.way != Forward::Way::HELD) {
      const Suspension own;
      if (const at::Tensor again = frame.forward.held_again(self->index); again.defined()) {
        return THPVariable_Wrap(again);
      }
      if (frame.is_timed) {
        frame.begin_backward();
      }
      frame.flow->pump(frame, saved.largest_bytes);
      if (saved.way == Forward::Way::RECOMPUTED && !saved.restored.defined()) {
        frame.restore_here(self->index);
      }
      const at::Tensor found =
          saved.way == Forward::Way::VIEW ? frame.view(self->index) : frame.take(self->index);
      if (!keeps_graph()) {
        frame.forward.hold(self->index, found);
      }
      return THPVariable_Wrap(found);
    }
    if (saved.held.defined()) {
      return THPVariable_Wrap(saved.held);
    }
    const Suspension own;
    return THPVariable_Wrap(frame.given(self->index));
  });
  if (unpacked == nullptr) {
    translated([&]() -> PyObject* { // `explain` runs Python, which may raise
      frame.explain();
      return nullptr;
    });
  }
  return unpacked;
}

PyMethodDef pack_method = {"pack", pack, METH_O, nullptr};
PyMethodDef unpack_method = {"unpack", unpack, METH_O, nullptr};

} // namespace

py::object pack_hook(const std::shared_ptr<Frame>& frame) {
  const py::capsule capsule(new Packs(frame), [](void* packs) { delete static_cast<Packs*>(packs); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, capsule.ptr()));
}

py::object unpack_hook() {
  static PyObject* const hook = PyCFunction_New(&unpack_method, nullptr);
  return py::reinterpret_borrow<py::object>(hook);
}

py::object type_of(py::handle tensor) {
  const bool is_subclass =
      !THPVariable_CheckExact(tensor.ptr()) && !tensor_of(tensor).key_set().has(c10::DispatchKey::Python);
  return is_subclass ? py::reinterpret_borrow<py::object>(py::type::handle_of(tensor)) : py::object();
}

py::object wrapped_as(const py::object& type, const at::Tensor& tensor) {
  if (!type) {
    return wrapped(tensor);
  }
  const at::AutoGradMode with_gradients(true); // the new object, a view of the tensor, has to be in the tensor's graph
  return wrapped(tensor).attr("as_subclass")(type);
}

bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.is_leaf()) {
    return false;
  }
  const py::gil_scoped_acquire locked;
  const py::object object = wrapped(tensor);
  return PyObject_IsInstance(object.ptr(), ParameterClass) == 1;
}

} // namespace memplug
