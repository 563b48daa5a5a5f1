// What Python sees of swap lists: they are added to the module of module.cpp.
#include "swap_module.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string_view>

#include "program_clock.h"
#include "saved_type.h"
#include "swap_list.h"

namespace py = pybind11;

namespace memplug {
namespace {

template <typename T>
std::vector<T> rows_in(const py::bytes& bytes) {
  const std::string_view view = bytes;
  std::vector<T> rows(view.size() / sizeof(T));
  std::memcpy(rows.data(), view.data(), rows.size() * sizeof(T));
  return rows;
}

py::dict named(const SwapCounters& c) {
  py::dict all;
  all["offloads"] = c.offloads;
  all["offloaded_bytes"] = c.offloaded_bytes;
  all["releases"] = c.releases;
  all["released_bytes"] = c.released_bytes;
  all["prefetches"] = c.prefetches;
  all["prefetched_bytes"] = c.prefetched_bytes;
  all["cancelled"] = c.cancelled;
  all["demanded"] = c.demanded;
  all["refused"] = c.refused;
  return all;
}

} // namespace

void add_swaps(py::module_& module) {
  py::class_<StorageSwapper, std::shared_ptr<StorageSwapper>>(module, "StorageSwapper")
      .def(py::init([](std::shared_ptr<Streams> streams, py::handle slab) {
        return std::make_shared<StorageSwapper>(std::move(streams), tensor_of(slab));
      }))
      .def_static("is_possible", &StorageSwapper::is_possible)
      .def("offload", [](StorageSwapper& swapper, py::handle tensor, int64_t key) {
        return swapper.offload(tensor_of(tensor).storage(), key);
      })
      .def("release", &StorageSwapper::release)
      .def("prefetch", &StorageSwapper::prefetch)
      .def("restore", &StorageSwapper::restore)
      .def("restore_all", &StorageSwapper::restore_all)
      .def_property_readonly("host_bytes", &StorageSwapper::host_bytes)
      .def_property_readonly("counters", [](StorageSwapper& swapper) { return named(swapper.counters()); });

  module.def(
      "load_swap_list",
      [](std::vector<int32_t> program,
         const py::bytes& ranks,
         const py::bytes& targets,
         int64_t min_bytes,
         std::shared_ptr<StorageSwapper> swapper,
         int32_t device_type) {
        load_swap_list(
            {std::move(program), rows_in<uint8_t>(ranks), rows_in<SwapTarget>(targets), min_bytes},
            std::move(swapper),
            device_type);
      });
  module.def("unload_swap_list", &unload_swap_list);
  module.def("begin_swap_step", &begin_swap_step);
  module.def("end_swap_step", &end_swap_step);
  module.def("swap_list_counters", [] {
    const SwapListCounters c = swap_list_counters();
    py::dict all;
    all["steps"] = c.steps;
    all["found"] = c.found;
    all["missed"] = c.missed;
    return all;
  });

  // In tests: where a program's operators are taken to be.
  module.def("program_places", [](std::vector<int32_t> program, const std::vector<int32_t>& operators) {
    ProgramClock clock;
    clock.load(std::move(program));
    std::vector<int32_t> places;
    for (const int32_t number : operators) {
      places.push_back(clock.tick(number));
    }
    return places;
  });
}

} // namespace memplug
