// Python's interface to the arena.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda_memory.h"
#include "registry.h"
#include "requests.h"
#include "rows.h"
#include "serving.h"

namespace py = pybind11;

namespace memplug {
namespace {

ArenaDevice& device_of(const std::string& type, int index) {
#ifdef MEMPLUG_CUDA_ARENA
  if (type == "cuda") {
    return cuda_device(index);
  }
#endif
  (void)index;
  if (type == "cuda") {
    throw std::runtime_error("the native core was built without CUDA");
  }
  return type == "cpu" ? cpu_device() : other_device();
}

void load_arena(
    int64_t number,
    const py::bytes& requests,
    const py::bytes& slots,
    const py::bytes& dynamic,
    const py::bytes& spaces,
    std::vector<uint64_t> crosses,
    std::vector<int64_t> ceilings,
    std::vector<int32_t> reusable,
    std::vector<std::vector<int32_t>> terms,
    int64_t reused_bytes,
    int64_t kept_bytes,
    int32_t streams) {
  ArenaPlan plan{
      rows_of<PlannedRequest>(requests),
      rows_of<KeptSlot>(slots),
      rows_of<DynamicRequest>(dynamic),
      rows_of<IdleSpace>(spaces),
      std::move(crosses),
      std::move(ceilings),
      std::move(reusable),
      std::move(terms),
      reused_bytes,
      kept_bytes,
      streams};
  const py::gil_scoped_release released; // reserving memory may take long
  the_arena()->load(std::move(plan), number);
}

void add_counters(py::module_& module) {
  py::class_<ArenaCounters> counters(module, "ArenaCounters");
  for (const auto& [name, value, is_now] : ARENA_COUNTERS) {
    counters.def_readonly(name, value);
  }
  counters.def_property_readonly("from_arena", &ArenaCounters::from_arena)
      .def_property_readonly("fallback", &ArenaCounters::fallback)
      .def_property_readonly("mismatched", &ArenaCounters::mismatched)
      .def("since", &ArenaCounters::since);
  module.def("arena_counters", [] { return the_arena()->counters(); });
}

void add_arenas(py::module_& module) {
  set_server(arena_server());
  add_counters(module);
  module.def("open_arena", [](const std::string& type, int index, bool checks) {
    open_arena(device_of(type, index), checks).forget_leftovers();
  });
  module.def("load_arena", &load_arena);
  module.def("turn_arena", [](int64_t number) { return the_arena()->turn(number); });
  module.def("unload_arena", [](int64_t number) { the_arena()->unload(number); });
  module.def("close_arena", [] {
    const py::gil_scoped_release released;
    the_arena()->close();
  });
  module.def("begin_arena_step", [](int32_t withheld) {
    the_arena()->begin_step();
    withhold(withheld);
    serve(true);
  });
  module.def("end_arena_step", [] { serve(false); });
  module.def("extend_arena", [](int64_t nbytes) {
    const py::gil_scoped_release released;
    the_arena()->extend(nbytes);
  });
  module.def("arena_leftovers", [] { return the_arena()->leftovers(); });
  module.def("arena_lifetimes", [] {
    const Lifetimes lifetimes = the_arena()->lifetimes();
    return std::make_pair(lifetimes.came(), lifetimes.freed());
  });
  module.def("resized_requests", [] { return the_arena()->resized(); });
  module.def("arena_owns", [](uintptr_t address) {
    Arena* const owner = arena_of(reinterpret_cast<const void*>(address));
    return owner != nullptr && owner->owns(reinterpret_cast<const void*>(address));
  });
  module.def("arenas_reserved_bytes", &reserved_bytes);
  module.def("arenas_live_bytes", &live_bytes);
  module.def("stand_before_cpu", [](bool on) {
    serve(false);
    if (on) {
      install_cpu(ARENA);
    } else {
      uninstall_cpu(ARENA);
    }
  });
  module.def("stand_before_other", [](bool on) {
    serve(false);
    on ? install_other(ARENA) : uninstall_other(ARENA);
  });

#ifdef MEMPLUG_CUDA_ARENA
  module.def("stand_before_cuda", [](bool on) {
    serve(false);
    stand_before_cuda(ARENA, on);
  });
#endif
}

const Registered arena_part({
    Level::SERVING,
    &add_arenas,
    &lock_arenas_for_fork,
    [](bool) { unlock_arenas_after_fork(); },
    [] {
      serve(false);
      uninstall_cpu(ARENA);
    },
});

} // namespace
} // namespace memplug
