// What Python sees of swap lists: they are added to the module of module.cpp.
#include "swap_module.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

#include "finder.h"
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

using Named = std::tuple<int64_t, int64_t, int32_t>;

const void* key_of(int64_t id) {
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(id));
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

  // In tests, without tensors: `step` has (number, depth, inputs, outputs) of each operator, tensors as (identity, bytes,
  // dtype). Returns the identity of the tensor that each target was taken for, -1: of none.
  module.def(
      "found_in",
      [](std::vector<int32_t> program,
         const py::bytes& ranks,
         const py::bytes& targets,
         const std::vector<std::tuple<int32_t, int32_t, std::vector<Named>, std::vector<Named>>>& step) {
        const SwapListPlan plan{std::move(program), rows_in<uint8_t>(ranks), rows_in<SwapTarget>(targets), 0};
        Finder finder(plan);
        finder.begin();
        std::vector<int64_t> found(plan.targets.size(), -1);
        const auto find = [&](const std::vector<Named>& values, int32_t number, bool output) {
          int32_t slot = 0;
          for (const auto& [id, nbytes, dtype] : values) {
            finder.see(key_of(id), nbytes, dtype);
            const int32_t target = finder.find(key_of(id), nbytes, number, output, slot++);
            if (target >= 0) {
              found[target] = id;
            }
          }
        };
        std::vector<size_t> running;
        const auto end = [&](int32_t depth) {
          for (; !running.empty() && std::get<1>(step[running.back()]) >= depth; running.pop_back()) {
            find(std::get<3>(step[running.back()]), std::get<0>(step[running.back()]), true);
          }
        };
        for (size_t i = 0; i < step.size(); ++i) {
          const auto& [number, depth, inputs, outputs] = step[i];
          end(depth);
          running.push_back(i);
          if (depth == 0) {
            finder.tick(number);
          }
          for (const auto& [id, nbytes, dtype] : inputs) {
            finder.see(key_of(id), nbytes, dtype);
            finder.read(key_of(id), number);
          }
          find(inputs, number, false);
        }
        end(0);
        return found;
      });
}

} // namespace memplug
