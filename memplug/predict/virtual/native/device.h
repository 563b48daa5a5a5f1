// A device for torch that computes nothing: kernels and copies advance its clocks, and memory is only addresses.
//
// It uses torch's slot for other vendors' devices, PrivateUse1, so a process can have either it or another device of that slot.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "clocks.h"
#include "memory.h"

namespace memplug {

constexpr auto kVirtual = c10::DeviceType::PrivateUse1;

// A tensor of an operator, with the properties that the operator's duration depends on.
struct TensorShape {
  std::vector<int64_t> sizes;
  std::string dtype;
  int64_t nbytes; // size of its elements
  bool contiguous;
};

// One kernel; `causal` is used by attention only.
struct Work {
  std::string name;
  std::vector<TensorShape> inputs, outputs;
  bool causal = false;
};

// The cost of a kernel.
struct Cost {
  double seconds = 0;
  double flops = 0; // floating-point operations of matrix products, convolutions and attention
};

// Functions that return the cost of a kernel (called once for each kind) and the duration of a copy of a size over the link; and
// the host's own time for each kernel or copy.
struct Costs {
  std::function<Cost(const Work&)> kernel;
  std::function<CopySeconds(CopyDirection, int64_t)> copy;
  double launch_s = 0;
};

// Returns the results of an operator that depends on values: CPU tensors with values, or meta tensors if only their shape matters.
// Without a result, the device makes one up. `waits` says whether the program waits for the result, or may never look at it.
using Answers = std::function<std::optional<std::vector<at::Tensor>>(const Work&, bool waits)>;

// The back end whose operators attention runs; OTHER: torch's generic operators for other vendors' devices.
enum class AttentionBackend : uint8_t { OTHER, CUDNN, FLASH };

class VirtualDevice {
 public:
  static VirtualDevice& get();

  // Registers the device with torch; throws if another device is registered as PrivateUse1.
  void start();

  void set_costs(Costs costs);

  // Queue work on the calling thread's current stream; `blocks` lets the host wait for the copy.
  void run(const Work& work);
  void launch(const std::string& name, double seconds);
  void copy(CopyDirection direction, int64_t nbytes, bool blocks);

  // `answers` is called on the thread that reads the value, without a lock of the device.
  void answer_by(Answers answers);
  std::optional<std::vector<at::Tensor>> answer(const Work& work, bool waits = true);

  // Resets clocks, counters and memory (`CachingMemory::restart`). Costs and answers stay.
  void restart();

  // Returns the floating-point operations of all kernels since the last start or restart.
  double flops();

  Clocks clocks;
  CachingMemory memory{clocks};
  std::atomic<double> true_share{1.0}; // fraction of each mask's elements that is taken to be true
  std::atomic<AttentionBackend> attention{AttentionBackend::OTHER};

 private:
  std::mutex mutex_;
  bool is_started_ = false;
  Costs costs_;
  Answers answers_;
  std::map<std::string, Cost> known_; // costs by kind: name, shapes and layout
  double flops_ = 0;
};

// Returns the calling thread's current stream.
int64_t current_stream();

c10::Allocator& virtual_allocator();
void register_operators();

} // namespace memplug
