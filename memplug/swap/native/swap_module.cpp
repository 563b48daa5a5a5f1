// What Python sees of swap lists: they are added to the module of module.cpp.
#include "swap_module.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>

#include "finder.h"
#include "relief.h"
#include "requests.h"
#include "rows.h"
#include "saved_type.h"
#include "swap_list.h"

namespace py = pybind11;

namespace memplug {
namespace {

using Named = std::tuple<int64_t, int64_t, int32_t>;

const void* key_of(int64_t id) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(id));
}

// In tests: a list and steps without tensors.
class Rehearsal {
 public:
  // Number, depth, inputs and outputs as (identity, bytes, dtype).
  using Step = std::vector<std::tuple<int32_t, int32_t, std::vector<Named>, std::vector<Named>>>;

  explicit Rehearsal(SwapListPlan plan) : plan_(std::move(plan)), finder_(plan_) {}

  // The identity of the tensor that each target is taken for in a step, -1: of none. The step is run so often.
  std::vector<int64_t> run(const Step& step, int times) {
    std::vector<int64_t> found;
    for (int time = 0; time < times; ++time) {
      found = run(step);
    }
    return found;
  }

 private:
  std::vector<int64_t> run(const Step& step) {
    finder_.begin([](const void*) { return false; });
    std::vector<int64_t> found(plan_.targets.size(), -1);
    std::vector<size_t> running;
    const auto end = [&](int32_t depth) {
      for (; !running.empty() && std::get<1>(step[running.back()]) >= depth; running.pop_back()) {
        find(std::get<3>(step[running.back()]), std::get<0>(step[running.back()]), true, found);
      }
    };
    for (size_t i = 0; i < step.size(); ++i) {
      const auto& [number, depth, inputs, outputs] = step[i];
      end(depth);
      running.push_back(i);
      if (depth == 0) {
        finder_.tick(number);
        int32_t slot = 0;
        for (const auto& [id, nbytes, dtype] : inputs) {
          finder_.anchor(key_of(id), slot++, number);
        }
      }
      for (const auto& [id, nbytes, dtype] : inputs) {
        finder_.see(key_of(id), nbytes, dtype, {});
        finder_.read(key_of(id), number);
      }
      find(inputs, number, false, found);
    }
    end(0);
    return found;
  }

  void find(const std::vector<Named>& values, int32_t number, bool output, std::vector<int64_t>& found) {
    for (const auto& [id, nbytes, dtype] : values) {
      finder_.see(key_of(id), nbytes, dtype, {});
    }
    if (!finder_.expects(number, output)) {
      return;
    }
    int32_t slot = 0;
    for (const auto& [id, nbytes, dtype] : values) {
      const int32_t target = finder_.find(key_of(id), nbytes, number, output, slot++);
      if (target >= 0) {
        found[target] = id;
      }
    }
  }

  const SwapListPlan plan_;
  Finder finder_;
};

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

} // namespace

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
         std::shared_ptr<StorageSwapper> swapper,
         int32_t device_type) {
        load_swap_list(
            {std::move(program),
             std::move(outside),
             rows_of<uint8_t>(ranks),
             rows_of<SwapTarget>(targets),
             rows_of<Anchor>(anchors),
             min_bytes},
            std::move(swapper),
            device_type);
      });
  using Released = py::call_guard<py::gil_scoped_release>; // an operator of another thread may wait for both locks
  module.def("unload_swap_list", &unload_swap_list, Released());
  module.def("drop_swap_list", &drop_swap_list, Released());
  module.def("begin_swap_step", &begin_swap_step, Released());
  module.def("end_swap_step", &end_swap_step, Released());
  module.def("catch_out_of_memory", [](bool on, const std::string& device, Explanation explain) {
    catch_out_of_memory(on, c10::Device(device), std::move(explain));
  });
  module.def("take_relief_events", [] {
    static constexpr const char* kNames[] = {"failed", "released", "left", "turned back", "served", "given up"}; // in the order of ReliefEvent::Kind
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

  // In tests: where a step's operators are taken to be.
  module.def("program_places", [](std::vector<int32_t> program, const std::vector<int32_t>& operators) {
    ProgramClock clock;
    clock.load(std::move(program));
    std::vector<int32_t> places;
    for (const int32_t number : operators) {
      places.push_back(clock.tick(number));
    }
    return places;
  });

  py::class_<Rehearsal>(module, "Rehearsal")
      .def(py::init([](std::vector<int32_t> program, const py::bytes& ranks, const py::bytes& targets, const py::bytes& anchors) {
        return std::make_unique<Rehearsal>(SwapListPlan{
            std::move(program), {}, rows_of<uint8_t>(ranks), rows_of<SwapTarget>(targets), rows_of<Anchor>(anchors)});
      }))
      .def("run", py::overload_cast<const Rehearsal::Step&, int>(&Rehearsal::run), py::arg("step"), py::arg("times") = 1);
}

} // namespace memplug
