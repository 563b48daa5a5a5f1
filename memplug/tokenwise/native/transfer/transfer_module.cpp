// Python bindings of transfers.
#include "transfer_module.h"

#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "python_tensors.h"
#include "registry.h"
#include "transfer.h"

namespace py = pybind11;

namespace memplug {

namespace {

py::object* raise_failure = nullptr; // not destroyed at exit: autograd graphs may outlive Python's modules

} // namespace

bool set_error(const std::exception& error) {
  const auto* const failure = dynamic_cast<const Failure*>(&error);
  if (failure == nullptr || raise_failure == nullptr) {
    return false;
  }
  try {
    (*raise_failure)(static_cast<int>(failure->kind), failure->what());
  } catch (py::error_already_set& raised) {
    raised.restore();
  }
  return true;
}

namespace {

void add_transfers(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& error) {
      if (!set_error(error)) {
        throw;
      }
    }
  });
  module.def("raise_failures_with", [](py::object raise) {
    delete std::exchange(raise_failure, new py::object(std::move(raise)));
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
      .def_readwrite("uses", &Swapped::uses);

  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
      .def(py::init<std::shared_ptr<Streams>, std::shared_ptr<RowStore>>())
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
      .def("drain", [](Transfer& transfer) { transfer.copies.drain(); })
      .def("close", &Transfer::close)
      .def("reserve", &Transfer::reserve, py::arg("count"), py::arg("nbytes"))
      .def_property_readonly("buffer_bytes", &Transfer::buffer_bytes)
      .def_readonly("buffer_misses", &Transfer::buffer_misses)
      .def_readonly("allocations", &Transfer::allocations)
      .def_readonly("prefetched_bytes", &Transfer::prefetched_bytes)
      .def_readonly("resident_bytes", &Transfer::resident_bytes)
      .def_readonly("offloads", &Transfer::offloads)
      .def_property_readonly("offloaded_total_bytes", [](const Transfer& transfer) { return transfer.copies.offloaded_bytes; })
      .def_property_readonly("prefetched_total_bytes", [](const Transfer& transfer) { return transfer.copies.prefetched_bytes; })
      .def_property_readonly("refused", [](const Transfer& transfer) { return transfer.copies.refused; })
      .def_property_readonly("refused_bytes", [](const Transfer& transfer) { return transfer.copies.refused_bytes; });
}

const Registered transfer_part({Level::ASKING, &add_transfers});

} // namespace
} // namespace memplug
