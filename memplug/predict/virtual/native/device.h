// A device for torch that computes nothing: kernels and copies advance its clocks, and memory is only addresses.
//
// The device uses PrivateUse1, torch's slot for other vendors' devices. A process can have only one device in this slot.
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

// The properties of an input or output on which a kernel's duration depends.
struct TensorShape {
  std::vector<int64_t> sizes;
  std::string dtype;
  int64_t nbytes; // size of all elements
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

// The costs of work on the device.
struct Costs {
  std::function<Cost(const Work&)> kernel; // called once for each combination of name, shapes and layouts
  std::function<CopySeconds(CopyDirection, int64_t)> copy; // the duration of a copy over the link, by its bytes
  double launch_s = 0; // the host's time to queue one kernel or copy
};

// Returns the results of an operator that reads values, or whose output shapes depend on values: CPU tensors, or meta
// tensors if only shapes matter. If the function returns none, the device makes the results up, or the operator fails.
// `waits`: whether the program waits for the result; otherwise it may never read it.
using Answers = std::function<std::optional<std::vector<at::Tensor>>(const Work&, bool waits)>;

// The back end whose operators run attention; OTHER: torch's generic operators for other vendors' devices.
enum class AttentionBackend : uint8_t { OTHER, CUDNN, FLASH };

class VirtualDevice {
 public:
  static VirtualDevice& get();

  // Registers the device with torch; throws if another device is registered as PrivateUse1.
  void start();

  void set_costs(Costs costs);

  // Queue work on the calling thread's current stream. `run` queues a kernel and takes its cost from `Costs`; `launch`
  // queues a kernel of `seconds`; `copy` queues a copy over the link, and makes the host wait for it if `blocks`.
  void run(const Work& work);
  void launch(const std::string& name, double seconds);
  void copy(CopyDirection direction, int64_t nbytes, bool blocks);

  // Sets the function that `answer` calls, on the thread that reads a value. The device holds no lock during the call.
  void answer_by(Answers answers);
  std::optional<std::vector<at::Tensor>> answer(const Work& work, bool waits = true);

  // Sets clocks and counters to zero and restarts memory (`CachingMemory::restart`). Costs and answers stay.
  void restart();

  // Returns the floating-point operations of all kernels since the last start or restart.
  double flops();

  Clocks clocks;
  CachingMemory memory{clocks};
  std::atomic<double> true_share{1.0}; // fraction of a mask's elements that counts as true if there is no answer
  std::atomic<AttentionBackend> attention{AttentionBackend::OTHER};

 private:
  std::mutex mutex_;
  bool is_started_ = false;
  Costs costs_;
  Answers answers_;
  std::map<std::string, Cost> known_; // costs of kernels by name, shapes and layout
  double flops_ = 0;
};

// Returns the calling thread's current stream.
int64_t current_stream();

c10::Allocator& virtual_allocator();
void register_operators();

} // namespace memplug
