// A device that Python implements: its streams and events are Python objects.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "python_tensors.h"
#include "streams.h"

namespace memplug {

class __attribute__((visibility("hidden"))) PythonStreams final : public Streams {
 public:
  explicit PythonStreams(pybind11::object device) : device_(std::move(device)) {}

  StreamRef make() override {
    return kept(device_.attr("new_stream")());
  }
  StreamRef current() override {
    return kept(device_.attr("compute_stream")());
  }
  bool same(const StreamRef& one, const StreamRef& other) override {
    return object_of(one).equal(object_of(other));
  }
  EventRef record(const StreamRef& stream) override {
    return kept(device_.attr("record")(object_of(stream)));
  }
  void wait(const StreamRef& stream, const EventRef& event, Wait) override {
    device_.attr("wait")(object_of(stream), object_of(event));
  }
  void copy(const StreamRef& stream, const at::Tensor& destination, const at::Tensor& source) override {
    device_.attr("copy")(object_of(stream), wrapped(destination), wrapped(source));
  }
  at::Tensor empty(const StreamRef& stream, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) override {
    const auto ints = [](at::IntArrayRef values) { return pybind11::tuple(pybind11::cast(values.vec())); };
    const pybind11::object dtype_object = pybind11::reinterpret_borrow<pybind11::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
    return tensor_of(device_.attr("empty")(object_of(stream), ints(size), ints(stride), dtype_object));
  }

 private:
  // Keeps an object alive; None becomes null, as on the CPU.
  static std::shared_ptr<void> kept(pybind11::object object) {
    if (object.is_none()) {
      return nullptr;
    }
    return {object.release().ptr(), [](void* pointer) {
              if (Py_IsInitialized() != 0) {
                const pybind11::gil_scoped_acquire locked;
                Py_DECREF(static_cast<PyObject*>(pointer));
              }
            }};
  }
  static pybind11::object object_of(const std::shared_ptr<void>& kept) {
    return kept == nullptr ? pybind11::none()
                           : pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(kept.get()));
  }

  pybind11::object device_;
};

} // namespace memplug
