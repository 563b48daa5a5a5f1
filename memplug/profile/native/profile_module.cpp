// Python bindings of the recorder: operators, memory requests and places.
#include <pybind11/stl.h>

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "bus.h"
#include "clock.h"
#include "cuda_memory.h"
#include "operator_names.h"
#include "place_hooks.h"
#include "python_tensors.h"
#include "registry.h"
#include "requests.h"
#include "rows.h"
#include "sequence.h"

namespace py = pybind11;

namespace memplug {
namespace {

py::tuple to_tuple(Place place) {
  return py::make_tuple(place.pass, place.micro_batch, place.layer);
}

// Context manager `with suspended:` around operators that are memplug's own.
struct Suspended {
  void enter() {
    suspend();
  }
  void exit(const py::args&) {
    resume();
  }
};

// Context manager `with in_framework:` around operators that are a framework's.
struct InFramework {
  void enter() {
    begin_framework();
  }
  void exit(const py::args&) {
    end_framework();
  }
};

void add_operators(py::module_& module) {
  module.def("claim", &claim);
  module.def("release", &release);
  module.def("watch", &watch);
  module.def("operator_names", &operator_names);
  module.def("operator_numbers", &operator_numbers);
  module.def("take_sequence", [] {
    const auto [numbers, count] = take_sequence();
    return py::make_tuple(bytes_of(numbers), count);
  });
  module.def("begin_records", [](int detail, int device_type) {
    begin_records(static_cast<Detail>(detail), device_type);
  });
  module.def("end_records", [] {
    const Records records = end_records();
    return py::make_tuple(bytes_of(records.operators), bytes_of(records.uses), bytes_of(records.tensors));
  });
  module.def("recorded_numbers", [](const py::list& tensors) {
    std::vector<at::Tensor> found;
    for (const py::handle tensor : tensors) {
      found.push_back(tensor_of(tensor));
    }
    return recorded_numbers(found);
  });
  module.def("running_operator", &running_operator);
}

void add_requests(py::module_& module) {
  module.def("begin_requests", &begin_requests);
  module.def("end_requests", &end_requests);
  module.def("take_requests", [] { return bytes_of(take_requests()); });
  module.def("tracked_bytes", &tracked_bytes);
  module.def("usage", [] {
    const Usage u = usage();
    return py::make_tuple(u.base_bytes, u.in_use_bytes, u.peak_bytes, u.marked_peak_bytes);
  });
  module.def("mark_peak", &mark_peak);
  module.def("install_cpu", [] { install_cpu(RECORDER); });
  module.def("uninstall_cpu", [] { uninstall_cpu(RECORDER); });
  module.def("install_other", [] { install_other(RECORDER); });
  module.def("uninstall_other", [] { uninstall_other(RECORDER); });
  module.def("device_type", [](const std::string& name) { return static_cast<int>(c10::Device(name).type()); });
#ifdef MEMPLUG_CUDA
  module.def("install_cuda", &install_cuda);
  module.def("uninstall_cuda", &uninstall_cuda);
#endif
}

void add_places(py::module_& module) {
  add_place_hooks(module);
  module.def("here", [] { return to_tuple(here()); });
  module.def("forget", &forget);
  module.def("nodes", &nodes);
  module.def("scalar_types", [] {
    std::vector<std::string> texts;
    for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
      texts.emplace_back(c10::toString(static_cast<c10::ScalarType>(i)));
    }
    return texts;
  });
  py::class_<Suspended>(module, "Suspended")
      .def(py::init<>())
      .def("__enter__", &Suspended::enter)
      .def("__exit__", &Suspended::exit);
  py::class_<InFramework>(module, "InFramework")
      .def(py::init<>())
      .def("__enter__", &InFramework::enter)
      .def("__exit__", &InFramework::exit);
}

const Registered profile_part({
    Level::PROFILE,
    [](py::module_& module) {
      add_operators(module);
      add_requests(module);
      add_places(module);
    },
    [] {
      lock_cpu_for_fork();
      lock_requests_for_fork();
      lock_records_for_fork();
      lock_places_for_fork();
      lock_bus_for_fork();
    },
    [](bool) {
      unlock_bus_after_fork();
      unlock_places_after_fork();
      unlock_records_after_fork();
      unlock_requests_after_fork();
      unlock_cpu_after_fork();
    },
    [] {
      end_requests();
      uninstall_cpu(RECORDER);
      limit_cpu(-1);
      release_in_child();
    },
});

} // namespace
} // namespace memplug
