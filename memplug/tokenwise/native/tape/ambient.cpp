#include "ambient.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <tuple>

#include "calls.h"
#include "saved_type.h"
#include "torch_private_csrc.h"

namespace py = pybind11;

namespace memplug {
namespace {

at::Tensor state_of(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

py::object default_device() {
  if (FunctionModes::stack_len() == 0) {
    return py::none();
  }
  return functions().default_device();
}

// A back end of attention, and its name in torch.backends.cuda.
struct NamedBackend {
  const char* name;
  bool (at::Context::*is_enabled)() const;
};

constexpr std::array<NamedBackend, std::tuple_size_v<Ambient::Attention>> kAttention{{
    {"flash", &at::Context::userEnabledFlashSDP},
    {"mem_efficient", &at::Context::userEnabledMemEfficientSDP},
    {"math", &at::Context::userEnabledMathSDP},
    {"cudnn", &at::Context::userEnabledCuDNNSDP},
}};

Ambient::Attention attention_now() {
  Ambient::Attention enabled;
  for (size_t i = 0; i < kAttention.size(); ++i) {
    enabled[i] = (at::globalContext().*kAttention[i].is_enabled)();
  }
  return enabled;
}

} // namespace

CpuRandom CpuRandom::now() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* const random = at::check_generator<at::CPUGeneratorImpl>(generator);
  return {random->engine(), random->next_float_normal_sample(), random->next_double_normal_sample()};
}

bool CpuRandom::operator==(const CpuRandom& other) const {
  const auto one = engine.data(), another = other.engine.data();
  return one.left_ == another.left_ && one.next_ == another.next_ && one.state_ == another.state_ &&
      one.seed_ == another.seed_ && one.seeded_ == another.seeded_ && next_float == other.next_float &&
      next_double == other.next_double;
}

at::Tensor CpuRandom::state() const {
  at::Generator generator = at::detail::createCPUGenerator();
  auto* const random = at::check_generator<at::CPUGeneratorImpl>(generator);
  random->set_engine(engine);
  random->set_next_float_normal_sample(next_float);
  random->set_next_double_normal_sample(next_double);
  return generator.get_state();
}

Ambient::Ambient(c10::Device device)
    : cpu_rng(CpuRandom::now()), attention(attention_now()), default_device(memplug::default_device()), device_(device) {
  const auto note = [&](c10::DeviceType type) {
    autocast.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  };
  note(c10::kCPU);
  if (!device.is_cpu()) {
    device_rng = state_of(device);
    note(device.type());
  }
}

void Ambient::forget_undrawn() {
  if (cpu_rng && *cpu_rng == CpuRandom::now()) {
    cpu_rng.reset();
  }
  if (device_rng) {
    const at::Tensor now = state_of(device_); // in host memory
    if (now.nbytes() == device_rng->nbytes() &&
        std::memcmp(now.const_data_ptr(), device_rng->const_data_ptr(), now.nbytes()) == 0) {
      device_rng.reset();
    }
  }
}

py::tuple Ambient::described() const {
  py::list casts;
  for (const Autocast& each : autocast) {
    auto* const dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(each.dtype));
    casts.append(py::make_tuple(
        c10::DeviceTypeName(each.device, true), each.enabled, py::reinterpret_borrow<py::object>(dtype)));
  }
  py::dict backends;
  for (size_t i = 0; i < kAttention.size(); ++i) {
    backends[kAttention[i].name] = attention[i];
  }
  return py::make_tuple(
      cpu_rng ? wrapped(cpu_rng->state()) : py::object(py::none()),
      device_rng ? wrapped(*device_rng) : py::object(py::none()),
      casts,
      backends,
      default_device);
}

bool Ambient::holds() const {
  return !cpu_rng && !device_rng && default_device.is_none() && memplug::default_device().is_none() &&
      attention == attention_now() &&
      std::all_of(autocast.begin(), autocast.end(), [](const Autocast& each) {
           return !each.enabled && !at::autocast::is_autocast_enabled(each.device) &&
               at::autocast::get_autocast_dtype(each.device) == each.dtype;
         });
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
