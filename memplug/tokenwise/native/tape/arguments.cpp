#include "arguments.h"

#include "calls.h"
#include "layouts.h"
#include "torch_private_csrc.h"

namespace py = pybind11;

namespace memplug {
namespace {

bool is_plain_leaf(PyObject* value) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == THPVariableClass || type == ParameterClass || value == Py_None || PyBool_Check(value) ||
      PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

} // namespace

Containers Containers::of(py::handle value, const Leaf& leaf) {
  Containers found;
  PyObject* const object = value.ptr();
  if (is_plain_leaf(object)) {
    leaf(value);
  } else if (PyDict_CheckExact(object)) {
    found.kind_ = ContainerKind::DICTIONARY;
    found.keys_ = py::reinterpret_steal<py::object>(PyDict_Keys(object));
    for (const auto& [key, each] : py::reinterpret_borrow<py::dict>(value)) {
      found.parts_.push_back(of(each, leaf));
    }
  } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    found.kind_ = PyTuple_CheckExact(object) ? ContainerKind::TUPLE : ContainerKind::LIST;
    for (const py::handle each : value) {
      found.parts_.push_back(of(each, leaf));
    }
  } else {
    found.kind_ = ContainerKind::TREE;
    const py::tuple flat = functions().tree_flatten(value);
    for (const py::handle each : flat[0]) {
      leaf(each);
      ++found.leaves_;
    }
    found.keys_ = flat[1];
  }
  return found;
}

py::object Containers::around(const NextLeaf& next) const {
  switch (kind_) {
    case ContainerKind::LEAF:
      return next();
    case ContainerKind::TREE: {
      py::list leaves;
      for (size_t i = 0; i < leaves_; ++i) {
        leaves.append(next());
      }
      return functions().tree_unflatten(leaves, keys_);
    }
    case ContainerKind::DICTIONARY: {
      py::dict made;
      for (size_t i = 0; i < parts_.size(); ++i) {
        made[py::list(keys_)[i]] = parts_[i].around(next);
      }
      return made;
    }
    default: {
      py::list made;
      for (const Containers& part : parts_) {
        made.append(part.around(next));
      }
      return kind_ == ContainerKind::TUPLE ? py::object(py::tuple(made)) : py::object(made);
    }
  }
}

int64_t given_bytes(py::handle arguments, py::handle keywords) {
  int64_t bytes = 0;
  const auto count = [&](py::handle value) {
    bytes += THPVariable_Check(value.ptr()) ? memory_bytes(THPVariable_Unpack(value.ptr())) : 0;
  };
  Containers::of(arguments, count);
  Containers::of(keywords, count);
  return bytes;
}

} // namespace memplug
