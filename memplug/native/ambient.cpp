#include "ambient.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <mutex>

#include "saved_type.h"

namespace py = pybind11;

namespace memplug {
namespace {

at::Tensor state_of(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

py::object default_device() {
  if (at::impl::PythonTorchFunctionTLS::stack_len() == 0) {
    return py::none();
  }
  return py::module_::import("memplug.tokenwise.regions.ambient").attr("default_device")();
}

} // namespace

Ambient::Ambient(c10::Device device) : cpu_rng(state_of(c10::kCPU)), default_device(memplug::default_device()) {
  const auto note = [&](c10::DeviceType type) {
    autocast.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  };
  note(c10::kCPU);
  if (!device.is_cpu()) {
    device_rng = state_of(device);
    note(device.type());
  }
  const at::Context& context = at::globalContext();
  attention = {
      context.userEnabledFlashSDP(),
      context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP()};
}

py::tuple Ambient::described() const {
  py::list casts;
  for (const Autocast& each : autocast) {
    auto* const dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(each.dtype));
    casts.append(py::make_tuple(
        c10::DeviceTypeName(each.device, true), each.enabled, py::reinterpret_borrow<py::object>(dtype)));
  }
  return py::make_tuple(
      wrapped(cpu_rng),
      device_rng ? wrapped(*device_rng) : py::none(),
      casts,
      py::make_tuple(attention[0], attention[1], attention[2], attention[3]),
      default_device);
}

bool Ambient::casts() const {
  return std::any_of(autocast.begin(), autocast.end(), [](const Autocast& each) { return each.enabled; });
}

WithoutAutocastCache::WithoutAutocastCache(bool casts)
    : casts_(casts), cached_(at::autocast::is_autocast_cache_enabled()) {
  if (casts_) {
    at::autocast::set_autocast_cache_enabled(false);
  }
}

WithoutAutocastCache::~WithoutAutocastCache() {
  if (casts_) {
    at::autocast::set_autocast_cache_enabled(cached_);
  }
}

} // namespace memplug
