// What Python sees. Only plain integers and bytes cross the border: the value types are Python's.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <c10/core/ScalarType.h>

#include <utility>

#include "clock.h"
#include "cuda_memory.h"
#include "operator_names.h"
#include "requests.h"
#include "rows.h"
#include "saved_type.h"
#include "sequence.h"
#include "serving.h"
#include "forward_module.h"
#include "inside.h"
#include "swap_list.h"
#include "swap_module.h"
#include "transfer_module.h"

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

// `with in_framework:` around operators that are a framework's.
struct InFramework {
  void enter() {
    memplug::begin_framework();
  }
  void exit(const py::args&) {
    memplug::end_framework();
  }
};

memplug::Device& device_of(const std::string& type, int index) {
#ifdef MEMPLUG_CUDA_ARENA
  if (type == "cuda") {
    return memplug::cuda_device(index);
  }
#endif
  (void)index;
  if (type == "cuda") {
    throw std::runtime_error("the native core was built without CUDA");
  }
  return type == "cpu" ? memplug::cpu_device() : memplug::other_device();
}

void load_arena(
    const py::bytes& requests,
    const py::bytes& slots,
    const py::bytes& dynamic,
    const py::bytes& spaces,
    std::vector<uint64_t> crosses,
    std::vector<int32_t> reusable,
    int64_t reused_bytes,
    int64_t kept_bytes,
    int32_t streams) {
  memplug::ArenaPlan plan{
      memplug::rows_of<memplug::PlannedRequest>(requests),
      memplug::rows_of<memplug::KeptSlot>(slots),
      memplug::rows_of<memplug::DynamicRequest>(dynamic),
      memplug::rows_of<memplug::IdleSpace>(spaces),
      std::move(crosses),
      std::move(reusable),
      reused_bytes,
      kept_bytes,
      streams};
  const py::gil_scoped_release released; // reserving may take long
  memplug::the_arena()->load(std::move(plan));
}

py::dict arena_counters() {
  const memplug::ArenaCounters c = memplug::the_arena()->counters();
  py::dict all;
  all["planned"] = c.planned;
  all["planned_bytes"] = c.planned_bytes;
  all["dynamic"] = c.dynamic;
  all["dynamic_bytes"] = c.dynamic_bytes;
  all["reusable"] = c.reusable;
  all["reusable_bytes"] = c.reusable_bytes;
  all["unplanned"] = c.unplanned;
  all["occupied"] = c.occupied;
  all["dynamic_missed"] = c.dynamic_missed;
  all["without_gradients"] = c.without_gradients;
  all["native_bytes"] = c.native_bytes;
  all["elsewhere"] = c.elsewhere;
  all["lasting"] = c.lasting;
  all["lasting_bytes"] = c.lasting_bytes;
  all["written_freed"] = c.written_freed;
  all["written_beyond"] = c.written_beyond;
  all["reserved_bytes"] = c.reserved_bytes;
  all["leftover_bytes"] = c.leftover_bytes;
  all["live_bytes"] = c.live_bytes;
  all["live_size"] = c.live_size;
  all["peak_bytes"] = c.peak_bytes;
  all["peak_size"] = c.peak_size;
  return all;
}

void before_fork() {
  memplug::lock_swap_list_for_fork();
  memplug::lock_arenas_for_fork();
  memplug::lock_cpu_for_fork();
  memplug::lock_requests_for_fork();
  memplug::lock_records_for_fork();
  memplug::lock_places_for_fork();
}

void after_fork(bool in_child) {
  memplug::unlock_places_after_fork();
  memplug::unlock_records_after_fork();
  memplug::unlock_requests_after_fork();
  memplug::unlock_cpu_after_fork();
  memplug::unlock_arenas_after_fork();
  memplug::unlock_swap_list_after_fork(in_child);
}

// A child process is not recorded or served: its allocator is torch's, and the callback records nothing.
void after_fork_in_child() {
  after_fork(true);
  memplug::end_requests();
  memplug::serve(false);
  memplug::uninstall_cpu(memplug::RECORDER);
  memplug::uninstall_cpu(memplug::ARENA);
  memplug::limit_cpu(-1);
  memplug::release_in_child();
  memplug::silence_swap_list();
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memplug;
  pthread_atfork(before_fork, [] { after_fork(false); }, after_fork_in_child);

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

  module.def("open_arena", [](const std::string& type, int index, bool checks) {
    open_arena(device_of(type, index), checks).forget_leftovers();
  });
  module.def("load_arena", &load_arena);
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
  module.def("late_requests", [] { return the_arena()->late(); });
  module.def("arena_counters", &arena_counters);
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

  add_inside(module);
  add_transfers(module);
  add_forwards(module);
  add_swaps(module);

  py::class_<Suspended>(module, "Suspended")
      .def(py::init<>())
      .def("__enter__", &Suspended::enter)
      .def("__exit__", &Suspended::exit);
  py::class_<InFramework>(module, "InFramework")
      .def(py::init<>())
      .def("__enter__", &InFramework::enter)
      .def("__exit__", &InFramework::exit);
}
