// The state around a region's forward that a recompute pass must meet again where it runs the module.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <vector>

namespace memplug {

// The CPU's generator: to make a tensor of it, as its `get_state` does, takes longer than to copy it.
struct CpuRandom {
  static CpuRandom now();

  bool operator==(const CpuRandom& other) const;

  // As `torch.get_rng_state` gave it then.
  at::Tensor state() const;

  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

// Taken when a region's forward starts; memplug/tokenwise/engine/ambient.py brings it back. Guarded by Python's lock.
struct Ambient {
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };

  using Attention = std::array<bool, 4>; // of each back end, whether it is enabled

  // `device`: where the training runs.
  explicit Ambient(c10::Device device);

  // As the arguments of Python's `restored`.
  pybind11::tuple described() const;

  // Whether all of it is so now, for a pass in which nothing draws.
  bool holds() const;

  bool casts() const;

  // What was taken has run, and has put back no generator's state: those that are as before need not be brought back.
  void forget_undrawn();

  std::optional<CpuRandom> cpu_rng; // none where nothing draws from it
  std::optional<at::Tensor> device_rng; // the same; none on the CPU
  std::vector<Autocast> autocast;
  Attention attention;
  pybind11::object default_device; // of factory functions, or None

 private:
  c10::Device device_;
};

// No weight is cast once for two regions, whose recompute passes would each cast it again.
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
