// The state around a region's forward or a unit's call, such as random generators and autocast. A recompute pass
// restores this state before it runs the module or the unit again.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <vector>

namespace memplug {

// The state of the CPU's random generator. `now` copies the generator's fields, since `get_state` would make a tensor
// and so take longer.
struct CpuRandom {
  static CpuRandom now();

  bool operator==(const CpuRandom& other) const;

  // Returns the state as the tensor that `torch.get_rng_state` would have returned at the time of `now`.
  at::Tensor state() const;

  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

// The state at the start of a region's forward or a unit's call; memplug/tokenwise/engine/ambient.py restores it.
// Guarded by Python's lock.
struct Ambient {
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  using Attention = std::array<bool, 4>; // for each of torch's attention back ends, whether it is enabled

  // Stores the present state. `device`: the device that trains.
  explicit Ambient(c10::Device device);

  // Returns the state as arguments of `restored` in ambient.py.
  pybind11::tuple described() const;

  // Returns whether code can run again without restoring the stored state, since the thread's present state is as good.
  // Always false while the state of a generator is stored (see `forget_undrawn`).
  bool holds() const;

  // Returns whether autocast was enabled for any device.
  bool casts() const;

  // Drops the stored states that still equal the generators' states: nothing has drawn, so they need not be restored.
  // Called after a unit has run. Not called for a unit that may set a generator's state back itself, since equal states
  // would then prove nothing.
  void forget_undrawn();

  std::optional<CpuRandom> cpu_rng; // state of the CPU's generator; none once dropped
  std::optional<at::Tensor> device_rng; // state of the device's generator; none once dropped, or if the CPU trains
  std::vector<Autocast> autocast;
  Attention attention;
  pybind11::object default_device; // torch's default device for factory functions, or None

 private:
  c10::Device device_;
};

// While an instance lives, autocast caches no casts. With the cache two regions would share one cast of a weight, but
// each region's recompute pass would make it again. `casts`: whether autocast is enabled; if not, an instance has no
// effect.
class WithoutAutocastCache {
 public:
  explicit WithoutAutocastCache(bool casts);
  ~WithoutAutocastCache();
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;

 private:
  bool casts_, cached_;
};

} // namespace memplug
