// Python bindings of the virtual device.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"

namespace py = pybind11;
using memplug::VirtualDevice;

namespace {

// Returns a shared pointer to a Python function; its deleter acquires Python's lock.
template <typename Function>
std::shared_ptr<py::function> kept(Function function) {
  return {new py::function(std::move(function)), [](py::function* each) {
            const py::gil_scoped_acquire locked;
            delete each;
          }};
}

// Waits until autograd's thread has destroyed the objects of its last task, which may be Python objects. To do so, runs
// one more backward on autograd's thread, from a new thread without Python objects. The tensor is empty, because the
// device's memory may be used up.
void settle() {
  std::thread([] {
    try {
      const at::Tensor none = at::empty({0}, at::TensorOptions().device(at::kPrivateUse1));
      none.detach().set_requires_grad(true).backward(none);
    } catch (const std::exception&) { // a failure must not stop the process from ending
    }
  }).join();
}

} // namespace

PYBIND11_MODULE(memplug_virtual, module) {
  py::class_<memplug::TensorShape>(module, "TensorShape")
      .def_readonly("sizes", &memplug::TensorShape::sizes)
      .def_readonly("dtype", &memplug::TensorShape::dtype)
      .def_readonly("nbytes", &memplug::TensorShape::nbytes)
      .def_readonly("contiguous", &memplug::TensorShape::contiguous);
  py::class_<memplug::Work>(module, "Work")
      .def_readonly("name", &memplug::Work::name)
      .def_readonly("inputs", &memplug::Work::inputs)
      .def_readonly("outputs", &memplug::Work::outputs)
      .def_readonly("causal", &memplug::Work::causal);
  py::class_<memplug::Span>(module, "Span")
      .def_readonly("stream", &memplug::Span::stream)
      .def_readonly("begin_s", &memplug::Span::begin_s)
      .def_readonly("end_s", &memplug::Span::end_s)
      .def_readonly("queued_s", &memplug::Span::queued_s)
      .def_readonly("name", &memplug::Span::name);
  py::class_<memplug::VirtualMemory>(module, "VirtualMemory")
      .def_readonly("requested", &memplug::VirtualMemory::requested)
      .def_readonly("allocated", &memplug::VirtualMemory::allocated)
      .def_readonly("reserved", &memplug::VirtualMemory::reserved)
      .def_readonly("requested_peak", &memplug::VirtualMemory::requested_peak)
      .def_readonly("allocated_peak", &memplug::VirtualMemory::allocated_peak)
      .def_readonly("reserved_peak", &memplug::VirtualMemory::reserved_peak)
      .def_readonly("retries", &memplug::VirtualMemory::retries)
      .def_readonly("holes", &memplug::VirtualMemory::holes);
  module.def("start", [] { VirtualDevice::get().start(); });
  module.def("settle", &settle, py::call_guard<py::gil_scoped_release>());
  module.def("restart", [] { VirtualDevice::get().restart(); }, py::call_guard<py::gil_scoped_release>());
  module.def("set_costs", [](py::function kernel, py::function copy, double launch_s) {
    VirtualDevice::get().set_costs(
        {[ask = kept(std::move(kernel))](const memplug::Work& work) {
           const py::gil_scoped_acquire locked;
           const auto cost = (*ask)(work).cast<std::pair<double, double>>();
           return memplug::Cost{cost.first, cost.second};
         },
         [ask = kept(std::move(copy))](memplug::CopyDirection direction, int64_t nbytes) {
           const py::gil_scoped_acquire locked;
           const auto [alone, beside] =
               (*ask)(direction == memplug::CopyDirection::TO_HOST, nbytes).cast<std::pair<double, double>>();
           return memplug::CopySeconds{alone, beside};
         },
         launch_s});
  });
  module.def("host_s", [] { return VirtualDevice::get().clocks.host_s(); });
  module.def("spend", [](double seconds) { VirtualDevice::get().clocks.spend(seconds); });
  module.def("launch", [](const std::string& name, double seconds) {
    VirtualDevice::get().launch(name, seconds);
  });
  module.def("attend_by", [](const std::string& backend) {
    using memplug::AttentionBackend;
    const std::map<std::string, AttentionBackend> known{
        {"cudnn", AttentionBackend::CUDNN}, {"flash", AttentionBackend::FLASH}};
    const auto found = known.find(backend);
    VirtualDevice::get().attention = found == known.end() ? AttentionBackend::OTHER : found->second;
  });
  module.def("answer_by", [](const std::optional<py::function>& answers) {
    if (!answers) {
      VirtualDevice::get().answer_by(nullptr);
      return;
    }
    VirtualDevice::get().answer_by([ask = kept(*answers)](const memplug::Work& work, bool waits) {
      const py::gil_scoped_acquire locked;
      return (*ask)(work, waits).cast<std::optional<std::vector<at::Tensor>>>();
    });
  });
  module.def("assume_true", [](double share) { VirtualDevice::get().true_share = share; });
  module.def("synchronize", [] {
    auto& clocks = VirtualDevice::get().clocks;
    clocks.wait(clocks.all_over_s());
    return clocks.host_s();
  });
  module.def("flops", [] { return VirtualDevice::get().flops(); });
  module.def("keep_spans", [](bool on) { VirtualDevice::get().clocks.keep_spans(on); });
  module.def("take_spans", [] { return VirtualDevice::get().clocks.take_spans(); });
  module.def("memory", [] { return VirtualDevice::get().memory.usage(); });
  module.def("limit_memory", [](int64_t nbytes) { VirtualDevice::get().memory.limit(nbytes); });
  module.def("expand_segments", [](bool on) { VirtualDevice::get().memory.expand_segments(on); });
  module.def("reset_peaks", [] { VirtualDevice::get().memory.reset_peaks(); });
  module.def("empty_cache", [] { VirtualDevice::get().memory.empty_cache(); });
}
