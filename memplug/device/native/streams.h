// Interface to a device's streams and events, and to the copies and memory that they order.
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
  PREFETCH_FOR_COMPUTE, // the copy in starts once earlier users of the device memory that it writes are done
  USE_FOR_PREFETCH, // an operator reads rows once their copy in has written them
  DISCARD_FOR_PREFETCH, // memory of an abandoned tensor is released once the copy in has written it
  USE_FOR_COMPUTE, // an operator reads memory of another stream once that stream has written it
};

// Opaque references to a device's stream and event. The CPU runs everything in program order: its streams are null, and
// so are its events, except those that `Streams::mark` returns.
using StreamRef = std::shared_ptr<void>;
using EventRef = std::shared_ptr<void>;

class Streams {
 public:
  virtual ~Streams() = default;

  // Makes a stream for copies.
  virtual StreamRef make() = 0;

  // Returns the stream that this thread's operators run on now.
  virtual StreamRef current() = 0;

  // Returns a number that changes when the current stream does, more cheaply than `current`; always 0 on a device whose
  // current stream never changes.
  virtual int64_t current_number() {
    return 0;
  }

  virtual bool same(const StreamRef& one, const StreamRef& other) = 0;

  // Returns the stream's index in `known`; appends the stream if it is new.
  size_t number_among(std::vector<StreamRef>& known, const StreamRef& stream) {
    // not a range loop: streams implemented in Python may let another thread run, which may add a stream
    for (size_t i = 0; i < known.size(); ++i) {
      if (const StreamRef each = known[i]; same(each, stream)) {
        return i;
      }
    }
    known.push_back(stream);
    return known.size() - 1;
  }

  // Returns an event that completes when the work queued on the stream so far is done.
  virtual EventRef record(const StreamRef& stream) = 0;

  // Returns an event as `record` does, which also takes the time. `seconds_between` returns the seconds from one such
  // event to a later one. It returns empty if one of them has not completed, or if the device does not measure time.
  virtual EventRef mark(const StreamRef& stream) {
    return record(stream);
  }
  virtual std::optional<double> seconds_between(const EventRef&, const EventRef&) {
    return std::nullopt;
  }

  // Makes work that is queued on the stream from now on wait for the event.
  virtual void wait(const StreamRef& stream, const EventRef& event, Wait why) = 0;

  // Returns whether work is done when the call that queues it returns, as on the CPU. On such a device the program
  // waits in the calls that copy, and never for events.
  virtual bool is_immediate() {
    return false;
  }

  // Returns whether a graph captures the current stream's work, which then does not run.
  virtual bool is_capturing() {
    return false;
  }

  // Queues a copy between tensors of one shape and dtype.
  virtual void copy(const StreamRef& stream, const at::Tensor& destination, const at::Tensor& source) = 0;

  // Returns uninitialised device memory that belongs to the stream.
  virtual at::Tensor empty(
      const StreamRef& stream, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) = 0;

  // Notes that this stream uses memory that may belong to another stream. Once the memory is freed, the allocator
  // reuses it only after the work that this stream has queued by then.
  virtual void use_on(const StreamRef&, const c10::DataPtr&) {}
  void use_on(const StreamRef& stream, const at::Tensor& tensor) {
    if (tensor.has_storage()) {
      use_on(stream, tensor.storage().data_ptr());
    }
  }

  // Returns uninitialised device memory of so many bytes that belongs to the stream.
  virtual c10::DataPtr allocate(const StreamRef& stream, int64_t nbytes);

  // Returns 1-D uint8 host memory, pinned if the device can pin; throws if the host has too little. On the CPU, the
  // memory does not come from torch's allocator, which serves the training there.
  virtual at::Tensor host_memory(int64_t nbytes);

  // Advance the host's clock on a device that simulates this clock (`HostClock`). `spend_forward` is called after a
  // region's forward, with the number of its operators; `spend_backward` is called before a saved tensor is restored
  // for a backward.
  virtual void spend_forward(int64_t) {}
  virtual void spend_backward() {}
};

// Returns streams of the CPU, on which copies run at once.
std::shared_ptr<Streams> cpu_streams();

// Advances a simulated host clock by the time of memplug's own work.
struct HostClock {
  std::function<void(double)> spend; // advances the clock by this many seconds
  // seconds that memplug takes: for each operator of a region's forward, for each such forward, for each restored
  // backward
  double observe_s, region_s, restore_s;
};

// Returns streams of an accelerator that torch knows (CUDA): its current streams, and copy streams of high priority.
std::shared_ptr<Streams> accelerator_streams(c10::Device device, std::optional<HostClock> clock = std::nullopt);

} // namespace memplug
