#include "ambient.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <cstring>
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

Ambient::Ambient(c10::Device device)
    : cpu_rng(state_of(c10::kCPU)), default_device(memplug::default_device()), device_(device) {
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

void Ambient::forget_undrawn() {
  const auto forget = [](std::optional<at::Tensor>& then, c10::Device device) {
    const at::Tensor now = then ? state_of(device) : at::Tensor(); // a generator's state is bytes of the host
    if (then && now.nbytes() == then->nbytes() &&
        std::memcmp(now.const_data_ptr(), then->const_data_ptr(), now.nbytes()) == 0) {
      then.reset();
    }
  };
  forget(cpu_rng, c10::kCPU);
  forget(device_rng, device_);
}

py::tuple Ambient::described() const {
  py::list casts;
  for (const Autocast& each : autocast) {
    auto* const dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(each.dtype));
    casts.append(py::make_tuple(
        c10::DeviceTypeName(each.device, true), each.enabled, py::reinterpret_borrow<py::object>(dtype)));
  }
  const auto state = [](const auto& rng) { return rng ? wrapped(*rng) : py::object(py::none()); };
  return py::make_tuple(
      state(cpu_rng),
      state(device_rng),
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
