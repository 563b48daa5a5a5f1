// What Python sees. Only plain integers and bytes cross the border: the value types are Python's.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <c10/core/ScalarType.h>

#include "clock.h"
#include "requests.h"
#include "sequence.h"

namespace py = pybind11;

namespace {

template <typename T>
py::bytes bytes_of(const std::vector<T>& rows) {
  return py::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(T));
}

py::tuple to_tuple(memplug::Place place) {
  return py::make_tuple(place.pass, place.micro_batch, place.layer);
}

// `with suspended:` around operators that are memplug's own.
struct Suspended {
  void enter() {
    memplug::suspend();
  }
  void exit(const py::args&) {
    memplug::resume();
  }
};

void before_fork() {
  memplug::lock_requests_for_fork();
  memplug::lock_records_for_fork();
  memplug::lock_places_for_fork();
}

void after_fork() {
  memplug::unlock_places_after_fork();
  memplug::unlock_records_after_fork();
  memplug::unlock_requests_after_fork();
}

// A child trains nothing of ours: it keeps neither the callback nor the allocator.
void after_fork_in_child() {
  after_fork();
  memplug::end_requests();
  memplug::uninstall_cpu();
  memplug::release();
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memplug;
  pthread_atfork(before_fork, after_fork, after_fork_in_child);

  module.def("claim", &claim);
  module.def("release", &release);
  module.def("watch", &watch);
  module.def("operator_names", &operator_names);
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

  module.def("begin_requests", &begin_requests);
  module.def("end_requests", &end_requests);
  module.def("take_requests", [] { return bytes_of(take_requests()); });
  module.def("tracked_bytes", &tracked_bytes);
  module.def("usage", [] {
    const Usage u = usage();
    return py::make_tuple(u.base_bytes, u.in_use_bytes, u.peak_bytes);
  });
  module.def("install_cpu", &install_cpu);
  module.def("uninstall_cpu", &uninstall_cpu);
#ifdef MEMPLUG_CUDA
  module.def("install_cuda", &install_cuda);
  module.def("uninstall_cuda", &uninstall_cuda);
#endif

  module.def("enter_forward", [](int micro_batch) { return to_tuple(enter_forward(micro_batch)); });
  module.def("enter_layer", [](int layer) { return to_tuple(enter_layer(layer)); });
  module.def("enter_optimizer", [] { return to_tuple(enter_optimizer()); });
  module.def("leave", [](const std::tuple<int32_t, int32_t, int32_t>& former) {
    leave({std::get<0>(former), std::get<1>(former), std::get<2>(former)});
  });
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
}
