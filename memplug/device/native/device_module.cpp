// Python bindings of streams and host rows.
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
