// Streams and events of one device, and what is queued on them: copies and memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace memplug {

// Why one stream waits for another.
enum class Wait : uint8_t {
  OFFLOAD_FOR_COMPUTE, // the copy out starts once the operator has written its output
  RELEASE_FOR_OFFLOAD, // device memory is released once its copy out has read it
  MUTATE_FOR_OFFLOAD, // an operator writes in place once the copy has read the former value
  PREFETCH_FOR_COMPUTE, // the copy in starts once earlier users of its device memory and of its slot are done
  USE_FOR_PREFETCH, // an operator reads rows once their copy in has written them
  DISCARD_FOR_PREFETCH, // memory of an abandoned tensor is released once its copy in has written it
  USE_FOR_COMPUTE, // an operator reads memory of another stream once that stream has written it
};

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

  // The stream's number among those that are known, of which it is one from then on.
  size_t number_among(std::vector<StreamRef>& known, const StreamRef& stream) {
    for (size_t i = 0; i < known.size(); ++i) { // a device in Python may let another thread add one
      if (const StreamRef each = known[i]; same(each, stream)) {
        return i;
      }
    }
    known.push_back(stream);
    return known.size() - 1;
  }

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
  virtual void wait(const StreamRef& stream, const EventRef& event, Wait why) = 0;

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

  // The same as so many bytes.
  virtual c10::DataPtr allocate(const StreamRef& stream, int64_t nbytes);

  // 1-D uint8 of the host, pinned where the device can; never the training allocator's. Throws where there is none.
  virtual at::Tensor host_memory(int64_t nbytes);

  // The host has run a region's forward of so many operators, or is about to restore what a backward asks for: time goes by
  // where the device keeps the host's clock.
  virtual void spend_forward(int64_t) {}
  virtual void spend_backward() {}
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
