// Streams, events and copies of one device, as transfers use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace memplug {

// Why one stream waits for another, as `Wait` in memplug/device/device.py; in its order.
enum class Wait : uint8_t {
  OFFLOAD_FOR_COMPUTE,
  RELEASE_FOR_OFFLOAD,
  MUTATE_FOR_OFFLOAD,
  PREFETCH_FOR_COMPUTE,
  USE_FOR_PREFETCH,
  DISCARD_FOR_PREFETCH,
  USE_FOR_COMPUTE,
};
constexpr size_t kWaits = 7;

// Of a device. On the CPU, where everything is in program order already, both are null.
using StreamRef = std::shared_ptr<void>;
using EventRef = std::shared_ptr<void>;

class Streams {
 public:
  virtual ~Streams() = default;

  // For copies.
  virtual StreamRef make() = 0;

  // That this thread's operators run on now.
  virtual StreamRef current() = 0;

  // The same, as a number.
  virtual int64_t current_number() {
    return 0;
  }

  virtual bool same(const StreamRef& one, const StreamRef& other) = 0;

  // An event that completes when the work queued on the stream so far is done.
  virtual EventRef record(const StreamRef& stream) = 0;

  // The same, and it tells when that was; seconds from one to a later one, none: they have not completed, or the device tells no times.
  virtual EventRef mark(const StreamRef& stream) {
    return record(stream);
  }
  virtual std::optional<double> seconds_between(const EventRef&, const EventRef&) {
    return std::nullopt;
  }

  // Work queued on the stream from now on starts after the event.
  void wait(const StreamRef& stream, const EventRef& event, Wait why) {
    ++waits[static_cast<size_t>(why)];
    if (left_out != why) {
      order(stream, event);
    }
  }

  // Whether all is done as it is asked for: then copies are what the program waits for, instead of events.
  virtual bool is_immediate() {
    return false;
  }

  // Whether the current stream's work is captured into a graph instead of run.
  virtual bool is_capturing() {
    return false;
  }

  // Queues a copy between tensors of one shape and dtype.
  virtual void copy(const StreamRef& stream, const at::Tensor& destination, const at::Tensor& source) = 0;

  // Uninitialised device memory that belongs to the stream.
  virtual at::Tensor empty(
      const StreamRef& stream, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) = 0;

  // Memory that may belong to another stream is reused only after the work queued on this one when it is freed.
  virtual void use_on(const StreamRef&, const c10::DataPtr&) {}
  void use_on(const StreamRef& stream, const at::Tensor& tensor) {
    if (tensor.has_storage()) {
      use_on(stream, tensor.storage().data_ptr());
    }
  }

  // Copies bytes of a device to or from a 1-D uint8 tensor of the host, from an offset on. On the CPU without operators; of
  // a device as a tensor: torch's allocator of pinned memory has to know what is still read.
  virtual void offload(const StreamRef& stream, const at::Tensor& host, int64_t offset, const void* memory, int64_t nbytes, c10::Device device);
  virtual void prefetch(const StreamRef& stream, void* memory, const at::Tensor& host, int64_t offset, int64_t nbytes, c10::Device device);
  virtual c10::DataPtr allocate(const StreamRef& stream, int64_t nbytes);

  // 1-D uint8 of the host, pinned where the device can; never the training allocator's. Throws where there is none.
  virtual at::Tensor host_memory(int64_t nbytes);

  // The host has run a region's forward of so many operators, or is about to restore what a backward asks for: time goes by
  // where the device keeps the host's clock.
  virtual void spend_forward(int64_t) {}
  virtual void spend_backward() {}

  std::array<int64_t, kWaits> waits{}; // how often each kind was asked for
  std::optional<Wait> left_out; // tests leave out one kind, everywhere, and show that something breaks

 private:
  virtual void order(const StreamRef& stream, const EventRef& event) = 0;
};

// Copies happen at once.
std::shared_ptr<Streams> cpu_streams();

// What memplug's own work takes of a clock of the host.
struct HostClock {
  std::function<void(double)> spend; // seconds
  double observe_s, region_s, restore_s; // for an operator of a forward, for a forward, for a backward
};

// Of an accelerator that torch knows (CUDA): its current streams, and copy streams of high priority.
std::shared_ptr<Streams> accelerator_streams(c10::Device device, std::optional<HostClock> clock = std::nullopt);

} // namespace memplug
