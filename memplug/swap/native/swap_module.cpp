// Python's interface to swap lists.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "finder.h"
#include "python_tensors.h"
#include "registry.h"
#include "relief.h"
#include "requests.h"
#include "rows.h"
#include "swap_list.h"

namespace py = pybind11;

namespace memplug {
namespace {

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
  all["passive"] = c.passive;
  all["passive_bytes"] = c.passive_bytes;
  return all;
}

void add_swaps(py::module_& module) {
  py::class_<StorageSwapper, std::shared_ptr<StorageSwapper>>(module, "StorageSwapper")
      .def(
          py::init([](std::shared_ptr<Streams> streams, const py::object& slab, int64_t passive_bytes) {
            return std::make_shared<StorageSwapper>(
                std::move(streams), slab.is_none() ? at::Tensor() : tensor_of(slab), passive_bytes);
          }),
          py::arg("streams"),
          py::arg("slab") = py::none(),
          py::arg("passive_bytes") = 0)
      .def_static("is_possible", &StorageSwapper::is_possible)
      .def("offload", [](StorageSwapper& swapper, py::handle tensor, int64_t key) {
        return swapper.offload(tensor_of(tensor).storage(), key);
      })
      .def("release", &StorageSwapper::release)
      .def("release_leaving", &StorageSwapper::release_leaving)
      .def("turn_back", &StorageSwapper::turn_back)
      .def("measure", &StorageSwapper::measure, py::arg("waits"), py::arg("operators") = false)
      .def("waited_s", &StorageSwapper::waited_s)
      .def("operators_s", &StorageSwapper::operators_s)
      .def("leave_now", [](StorageSwapper& swapper, py::handle tensor) {
        return swapper.leave_now(tensor_of(tensor).storage());
      })
      .def("prefetch", &StorageSwapper::prefetch)
      .def("restore", &StorageSwapper::restore)
      .def("use", [](StorageSwapper& swapper, py::handle tensor) {
        swapper.use(tensor_of(tensor).storage().unsafeGetStorageImpl());
      })
      .def("restore_all", &StorageSwapper::restore_all)
      .def_property_readonly("host_bytes", &StorageSwapper::host_bytes)
      .def_property_readonly("counters", [](StorageSwapper& swapper) { return named(swapper.counters()); });

  module.def(
      "load_swap_list",
      [](std::vector<int32_t> program,
         std::vector<std::pair<int32_t, std::vector<int32_t>>> outside,
         const py::bytes& ranks,
         const py::bytes& targets,
         const py::bytes& anchors,
         int64_t min_bytes,
         std::vector<std::string> collectives,
         std::shared_ptr<StorageSwapper> swapper,
         int32_t device_type) {
        load_swap_list(
            {std::move(program),
             std::move(outside),
             rows_of<uint8_t>(ranks),
             rows_of<SwapTarget>(targets),
             rows_of<Anchor>(anchors),
             min_bytes,
             std::move(collectives)},
            std::move(swapper),
            device_type);
      });
  // releases the GIL: another thread may hold the swap mutex inside of an operator, and wait for the GIL
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def("unload_swap_list", &unload_swap_list, Released());
  module.def("drop_swap_list", &drop_swap_list, Released());
  module.def("begin_swap_step", &begin_swap_step, Released());
  module.def("end_swap_step", &end_swap_step, Released());
  module.def("catch_out_of_memory", [](bool on, const std::string& device, Explanation explain) {
    catch_out_of_memory(on, c10::Device(device), std::move(explain));
  });
  module.def("take_relief_events", [] {
    static constexpr const char* kNames[] = {"failed", "released", "left", "turned back", "served", "given up"}; // in the order of ReliefEvent::ReliefKind
    py::list all;
    for (const ReliefEvent& event : take_relief_events()) {
      all.append(py::make_tuple(kNames[event.kind], event.nbytes));
    }
    return all;
  });
  module.def("limit_cpu", &limit_cpu);
  module.def("count_cpu", [](py::handle tensor) {
    c10::StorageImpl* const storage = tensor_of(tensor).storage().unsafeGetStorageImpl();
    count_cpu(pointer_of(*storage), static_cast<int64_t>(storage->nbytes()));
  });
  module.def("cpu_bytes", [] {
    const CpuBytes bytes = cpu_bytes();
    return py::make_tuple(bytes.in_use, bytes.peak);
  });
  module.def("swap_list_counters", [] {
    const SwapListCounters c = swap_list_counters();
    py::dict all;
    all["steps"] = c.steps;
    all["found"] = c.found;
    all["missed"] = c.missed;
    all["repeated"] = c.repeated;
    return all;
  });
}

const Registered swap_part({
    Level::ASKING,
    &add_swaps,
    &lock_swap_list_for_fork,
    &unlock_swap_list_after_fork,
    &silence_swap_list,
});

} // namespace
} // namespace memplug
