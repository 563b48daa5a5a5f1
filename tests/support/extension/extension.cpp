// Python bindings of the tests' own C++, which compiles the core's headers again.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "bus.cpp" // compiled again: the core's library exports only its module
#include "file_rows.h"
#include "leaving_out.h"
#include "python_streams.h"
#include "rehearsal.h"
#include "operator_names.cpp"
#include "rows.h"
#include "streams.cpp"
#include "watchers.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memplug;
  py::enum_<Wait>(module, "Wait")
      .value("OFFLOAD_FOR_COMPUTE", Wait::OFFLOAD_FOR_COMPUTE)
      .value("RELEASE_FOR_OFFLOAD", Wait::RELEASE_FOR_OFFLOAD)
      .value("MUTATE_FOR_OFFLOAD", Wait::MUTATE_FOR_OFFLOAD)
      .value("PREFETCH_FOR_COMPUTE", Wait::PREFETCH_FOR_COMPUTE)
      .value("USE_FOR_PREFETCH", Wait::USE_FOR_PREFETCH)
      .value("DISCARD_FOR_PREFETCH", Wait::DISCARD_FOR_PREFETCH)
      .value("USE_FOR_COMPUTE", Wait::USE_FOR_COMPUTE);
  py::class_<LeavingOut, Streams, std::shared_ptr<LeavingOut>>(module, "LeavingOut") // the core binds its base
      .def(py::init<std::shared_ptr<Streams>, std::optional<Wait>>())
      .def("count", [](const LeavingOut& streams, Wait why) { return streams.waits.at(static_cast<size_t>(why)); });

  py::class_<PythonStreams, Streams, std::shared_ptr<PythonStreams>>(module, "PythonStreams").def(py::init<py::object>());

  py::class_<FileRows, RowStore, std::shared_ptr<FileRows>>(module, "FileRows")
      .def(py::init<const std::string&>())
      .def_readonly("used_bytes", &FileRows::used_bytes);

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

  py::class_<Watching>(module, "Watching") // watches a bus of its own
      .def(py::init([](size_t order, int need) {
        return std::make_unique<Watching>(static_cast<Order>(order), noting_watcher(order, need));
      }));
  module.def("watch", [](size_t order, int need, bool throws, bool declines) {
    noting.at(order) = {throws, declines};
    set_watcher(static_cast<Order>(order), &noting_watcher(order, need));
  }, py::arg("order"), py::arg("need"), py::arg("throws") = false, py::arg("declines") = false);
  module.def("unwatch", [](size_t order) { set_watcher(static_cast<Order>(order), nullptr); });
  module.def("silence", [](size_t order) { silence(static_cast<Order>(order)); });
  module.def("take_heard", [] { return std::exchange(heard, {}); });
}
