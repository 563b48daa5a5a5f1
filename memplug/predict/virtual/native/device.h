// A device of torch's that computes nothing: kernels and copies take time of its clocks, memory is addresses.
//
// It takes torch's place for devices of others, PrivateUse1: one process has it, or another one that registers there.
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

// A tensor of an operator: all that its duration depends on.
struct TensorShape {
  std::vector<int64_t> sizes;
  std::string dtype;
  int64_t nbytes; // of its elements
  bool contiguous;
};

// One kernel; `causal` is of attention.
struct Work {
  std::string name;
  std::vector<TensorShape> inputs, outputs;
  bool causal = false;
};

// Of a kernel.
struct Cost {
  double seconds = 0;
  double flops = 0; // floating-point operations of matrix products, convolutions and attention
};

// What a kernel, or seconds that a copy of so many bytes over the link, takes; asked once for each of a kind. Of the host for each
// kernel, of its own.
struct Costs {
  std::function<Cost(const Work&)> kernel;
  std::function<CopySeconds(Link, int64_t)> copy;
  double launch_s = 0;
};

// What an operator that depends on values gives: tensors of the host, which have them, or on torch's meta device, of which the
// shape counts. Nothing: the device makes something up. Whether the program waits for it, or may never look at it.
using Answers = std::function<std::optional<std::vector<at::Tensor>>(const Work&, bool waits)>;

// Whose operators attention runs: for others than these, torch's for devices of other vendors.
enum class AttentionBackend : uint8_t { OTHER, CUDNN, FLASH };

class VirtualDevice {
 public:
  static VirtualDevice& get();

  // Known to torch from here on; throws where another device is registered in its place.
  void start();

  void set_costs(Costs costs);

  // Queued on the calling thread's current stream.
  void run(const Work& work);
  void launch(const std::string& name, double seconds);
  void copy(Link direction, int64_t nbytes, bool blocks);

  // Asked on the thread that reads, which has no lock of the device.
  void answer_by(Answers answers);
  std::optional<std::vector<at::Tensor>> answer(const Work& work, bool waits = true);

  // Clocks at zero, and nothing counted; memory as after `CachingMemory::restart`. Costs and answers stay.
  void restart();

  // Floating-point operations of all kernels since it last began.
  double flops();

  Clocks clocks;
  CachingMemory memory{clocks};
  std::atomic<double> true_share{1.0}; // of the elements of each mask
  std::atomic<AttentionBackend> attention{AttentionBackend::OTHER};

 private:
  std::mutex mutex_;
  bool is_started_ = false;
  Costs costs_;
  Answers answers_;
  std::map<std::string, Cost> known_; // by all that a kernel's duration depends on
  double flops_ = 0;
};

// The calling thread's.
int64_t current_stream();

c10::Allocator& virtual_allocator();
void register_operators();

} // namespace memplug
