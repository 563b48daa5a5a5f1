// What Python sees of streams and host rows.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "host_rows.h"
#include "python_tensors.h"
#include "registry.h"
#include "streams.h"

namespace py = pybind11;

namespace memplug {
namespace {

// A device that Python implements: its streams and events are Python's own objects.
class PythonStreams final : public Streams {
 public:
  explicit PythonStreams(py::object device) : device_(std::move(device)) {}

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
    const auto ints = [](at::IntArrayRef values) { return py::tuple(py::cast(values.vec())); };
    const py::object dtype_object = py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
    return tensor_of(device_.attr("empty")(object_of(stream), ints(size), ints(stride), dtype_object));
  }

 private:
  // None is null, as on the CPU.
  static std::shared_ptr<void> kept(py::object object) {
    if (object.is_none()) {
      return nullptr;
    }
    return {object.release().ptr(), [](void* pointer) {
              if (Py_IsInitialized() != 0) {
                const py::gil_scoped_acquire locked;
                Py_DECREF(static_cast<PyObject*>(pointer));
              }
            }};
  }
  static py::object object_of(const std::shared_ptr<void>& kept) {
    return kept == nullptr ? py::none()
                           : py::reinterpret_borrow<py::object>(static_cast<PyObject*>(kept.get()));
  }

  py::object device_;
};

void add_devices(py::module_& module) {
  py::class_<Streams, std::shared_ptr<Streams>>(module, "Streams");
  module.def("cpu_streams", &cpu_streams);
  module.def("other_streams", [](std::function<void(double)> spend, double observe_s, double region_s, double restore_s) {
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    return accelerator_streams(device, HostClock{std::move(spend), observe_s, region_s, restore_s});
  });
  module.def("cuda_streams", [](int index) {
    return accelerator_streams(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
  });
  module.def("python_streams", [](py::object device) -> std::shared_ptr<Streams> {
    return std::make_shared<PythonStreams>(std::move(device));
  });

  py::class_<Slot>(module, "Slot")
      .def_readonly("slab", &Slot::slab)
      .def_readonly("offset", &Slot::offset)
      .def_readonly("size", &Slot::size)
      .def_readonly("nbytes", &Slot::nbytes);
  py::class_<RowStore, std::shared_ptr<RowStore>>(module, "RowStore");
  py::class_<HostRows, RowStore, std::shared_ptr<HostRows>>(module, "HostRows")
      .def(py::init<std::function<bool(int64_t)>>())
      .def("take", &HostRows::take)
      .def("give", &HostRows::give)
      .def("add", [](HostRows& rows, py::handle slab) { rows.add(tensor_of(slab)); })
      .def("clear", &HostRows::clear)
      .def_readonly("used_bytes", &HostRows::used_bytes)
      .def_readwrite("peak_bytes", &HostRows::peak_bytes)
      .def_readwrite("recent_peak_bytes", &HostRows::recent_peak_bytes);
}

const Registered device_part({Level::DEVICE, &add_devices});

} // namespace
} // namespace memplug
