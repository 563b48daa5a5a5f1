// The state around a region's forward, such as generators and autocast, that a recompute pass restores to run the
// module.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <vector>

namespace memplug {

// The state of the CPU's random generator. Copying it is faster than making a tensor of it, as the generator's
// `get_state` does.
struct CpuRandom {
  static CpuRandom now();

  bool operator==(const CpuRandom& other) const;

  // Returns the state as `torch.get_rng_state` would have then.
  at::Tensor state() const;

  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

// The state when a region's forward starts; memplug/tokenwise/engine/ambient.py restores it. Guarded by Python's lock.
struct Ambient {
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  using Attention = std::array<bool, 4>; // whether each back end is enabled

  // Takes the state of now. `device`: where the training runs.
  explicit Ambient(c10::Device device);

  // Returns the state as the arguments of Python's `restored`.
  pybind11::tuple described() const;

  // Returns whether nothing has to be restored now, for a pass that draws no random numbers.
  bool holds() const;

  // Returns whether autocast is enabled for a device.
  bool casts() const;

  // Forgets the generators that have not changed since: they need not be restored. Called once the forward has run,
  // unless it restored a generator's state itself.
  void forget_undrawn();

  std::optional<CpuRandom> cpu_rng; // none if no operator drew from it
  std::optional<at::Tensor> device_rng; // likewise; none on the CPU
  std::vector<Autocast> autocast;
  Attention attention;
  pybind11::object default_device; // for factory functions, or None

 private:
  c10::Device device_;
};

// While one lives, autocast caches no casts. A weight cast once for two regions would be cast again by each recompute
// pass.
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
