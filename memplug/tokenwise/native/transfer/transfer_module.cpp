// What Python sees of transfers and host rows: they are added to the module of module.cpp.
#include "transfer_module.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>

#include "saved_type.h"
#include "torch_private_csrc.h"
#include "transfer.h"

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
  void order(const StreamRef& stream, const EventRef& event) override {
    device_.attr("wait")(object_of(stream), object_of(event));
  }

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

} // namespace

bool set_error(const std::exception& error) {
  const auto* const failure = dynamic_cast<const Failure*>(&error);
  if (failure == nullptr) {
    return false;
  }
  try {
    py::module_::import("memplug.tokenwise.engine.core").attr("fail")(static_cast<int>(failure->kind), failure->what());
  } catch (py::error_already_set& raised) {
    raised.restore();
  }
  return true;
}

void add_transfers(py::module_& module) {
  py::class_<Streams, std::shared_ptr<Streams>>(module, "Streams")
      .def_readonly("waits", &Streams::waits)
      .def("leave_out", [](Streams& streams, size_t why) { streams.left_out = static_cast<Wait>(why); });
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
  py::class_<HostRows, std::shared_ptr<HostRows>>(module, "HostRows")
      .def(py::init<std::function<bool(int64_t)>>())
      .def("take", &HostRows::take)
      .def("give", &HostRows::give)
      .def("add", [](HostRows& rows, py::handle slab) { rows.add(tensor_of(slab)); })
      .def("clear", &HostRows::clear)
      .def_readonly("used_bytes", &HostRows::used_bytes)
      .def_readwrite("limit_bytes", &HostRows::limit_bytes)
      .def_readwrite("peak_bytes", &HostRows::peak_bytes)
      .def_readwrite("recent_peak_bytes", &HostRows::recent_peak_bytes);

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& error) {
      if (!set_error(error)) {
        throw;
      }
    }
  });
  module.def("alias", [](py::handle tensor) { return wrapped(alias_of(tensor_of(tensor))); });

  py::class_<Swapped, std::shared_ptr<Swapped>>(module, "Swapped")
      .def_property_readonly(
          "tensor",
          [](const Swapped& swapped) -> py::object {
            return swapped.tensor.defined() ? wrapped(swapped.tensor) : py::none();
          })
      .def_property_readonly("whole", &Swapped::whole)
      .def_readonly("nbytes", &Swapped::nbytes)
      .def_readonly("rows", &Swapped::rows)
      .def_readonly("mutated", &Swapped::mutated)
      .def_readwrite("uses", &Swapped::uses);

  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
      .def(py::init<std::shared_ptr<Streams>, std::shared_ptr<HostRows>>())
      .def("offload", [](Transfer& transfer, py::handle tensor, int64_t rows, bool later) {
        return transfer.offload(tensor_of(tensor), rows, later);
      }, py::arg("tensor"), py::arg("rows"), py::arg("later") = false)
      .def("release", &Transfer::release)
      .def("before_write", &Transfer::before_write)
      .def("prefetch", &Transfer::prefetch)
      .def("acquire", [](Transfer& transfer, Swapped& swapped) {
        auto [tensor, rows] = transfer.acquire(swapped);
        return py::make_tuple(wrapped(tensor), rows);
      })
      .def("drop", &Transfer::drop)
      .def("drain", &Transfer::drain)
      .def("close", &Transfer::close)
      .def("reserve", &Transfer::reserve, py::arg("count"), py::arg("nbytes"))
      .def_property_readonly("buffer_bytes", &Transfer::buffer_bytes)
      .def_readonly("buffer_misses", &Transfer::buffer_misses)
      .def_readonly("allocations", &Transfer::allocations)
      .def_readonly("prefetched_bytes", &Transfer::prefetched_bytes)
      .def_readonly("resident_bytes", &Transfer::resident_bytes)
      .def_readonly("offloads", &Transfer::offloads)
      .def_readonly("offloaded_total_bytes", &Transfer::offloaded_total_bytes)
      .def_readonly("prefetched_total_bytes", &Transfer::prefetched_total_bytes)
      .def_readwrite("refused", &Transfer::refused)
      .def_readonly("refused_bytes", &Transfer::refused_bytes);
}

} // namespace memplug
