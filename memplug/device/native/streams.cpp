#include "streams.h"

#include "torch_private.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#ifdef MEMPLUG_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace memplug {
namespace {

class CpuStreams final : public Streams {
 public:
  using Clock = std::chrono::steady_clock;

  StreamRef make() override {
    return nullptr;
  }
  StreamRef current() override {
    return nullptr;
  }
  bool same(const StreamRef&, const StreamRef&) override {
    return true;
  }
  EventRef record(const StreamRef&) override {
    return nullptr;
  }
  void wait(const StreamRef&, const EventRef&, Wait) override {}
  EventRef mark(const StreamRef&) override {
    return std::make_shared<Clock::time_point>(Clock::now());
  }
  std::optional<double> seconds_between(const EventRef& begin, const EventRef& end) override {
    const auto at = [](const EventRef& event) { return *static_cast<const Clock::time_point*>(event.get()); };
    return std::chrono::duration<double>(at(end) - at(begin)).count();
  }
  bool is_immediate() override {
    return true;
  }
  void copy(const StreamRef&, const at::Tensor& destination, const at::Tensor& source) override {
    if (destination.is_contiguous() && source.is_contiguous()) {
      std::memcpy(destination.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      destination.copy_(source);
    }
  }
  at::Tensor empty(const StreamRef&, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::empty_strided(size, stride, at::TensorOptions().dtype(dtype));
  }
  c10::DataPtr allocate(const StreamRef&, int64_t nbytes) override {
    return c10::GetAllocator(c10::DeviceType::CPU)->allocate(static_cast<size_t>(nbytes));
  }
};

class AcceleratorStreams final : public Streams {
 public:
  AcceleratorStreams(c10::Device device, std::optional<HostClock> clock)
      : device_(device), backend_(device.type()), clock_(std::move(clock)) {}

  StreamRef make() override {
    // a kernel gathers rows that are not contiguous; high priority keeps it from queueing behind computation
    return std::make_shared<c10::Stream>(backend_.getNewStream(device_, kHighPriority));
  }
  StreamRef current() override {
    return std::make_shared<c10::Stream>(backend_.getStream(device_));
  }
  bool same(const StreamRef& one, const StreamRef& other) override {
    return of(one) == of(other);
  }
  EventRef record(const StreamRef& stream) override {
    auto event = std::make_shared<c10::Event>(device_.type());
    event->record(of(stream));
    return event;
  }
  EventRef mark(const StreamRef& stream) override {
    auto event = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    event->record(of(stream));
    return event;
  }
  std::optional<double> seconds_between(const EventRef& begin, const EventRef& end) override {
    const auto* const first = static_cast<const c10::Event*>(begin.get());
    const auto* const last = static_cast<const c10::Event*>(end.get());
    if (!first->query() || !last->query()) {
      return std::nullopt;
    }
    return first->elapsedTime(*last) / 1e3;
  }
  void wait(const StreamRef& stream, const EventRef& event, Wait) override {
    static_cast<const c10::Event*>(event.get())->block(of(stream));
  }
  int64_t current_number() override {
    return backend_.getStream(device_).id();
  }
#ifdef MEMPLUG_CUDA
  bool is_capturing() override {
    return device_.is_cuda() && c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  void copy(const StreamRef& stream, const at::Tensor& destination, const at::Tensor& source) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    const On on(backend_, of(stream));
    destination.copy_(source, /*non_blocking=*/true);
  }
  at::Tensor empty(const StreamRef& stream, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    const On on(backend_, of(stream));
    return at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(device_));
  }
  using Streams::use_on;
  void use_on(const StreamRef& stream, const c10::DataPtr& memory) override {
    if (memory && memory.device() == device_) {
      backend_.recordDataPtrOnStream(memory, of(stream));
    }
  }
  at::Tensor host_memory(int64_t nbytes) override {
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::empty_strided(
        {nbytes}, {1}, at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
  }
  void spend_forward(int64_t operators) override {
    if (clock_) {
      clock_->spend(clock_->region_s + static_cast<double>(operators) * clock_->observe_s);
    }
  }
  void spend_backward() override {
    if (clock_) {
      clock_->spend(clock_->restore_s);
    }
  }

 private:
  static constexpr int kHighPriority = -1;

  struct On {
    On(const c10::impl::VirtualGuardImpl& backend, c10::Stream stream)
        : backend(backend), before(backend.exchangeStream(stream)) {}
    ~On() {
      backend.exchangeStream(before);
    }
    const c10::impl::VirtualGuardImpl& backend;
    c10::Stream before;
  };

  static const c10::Stream& of(const StreamRef& stream) {
    return *static_cast<const c10::Stream*>(stream.get());
  }

  c10::Device device_;
  c10::impl::VirtualGuardImpl backend_;
  std::optional<HostClock> clock_;
};

} // namespace

c10::DataPtr Streams::allocate(const StreamRef& stream, int64_t nbytes) {
  const at::Tensor memory = empty(stream, {nbytes}, {1}, at::kByte);
  return std::move(pointer_of(*memory.storage().unsafeGetStorageImpl()));
}

at::Tensor Streams::host_memory(int64_t nbytes) {
  void* const memory = std::malloc(nbytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return at::from_blob(memory, {nbytes}, [](void* begin) { std::free(begin); }, at::TensorOptions().dtype(at::kByte));
}

std::shared_ptr<Streams> cpu_streams() {
  return std::make_shared<CpuStreams>();
}

std::shared_ptr<Streams> accelerator_streams(c10::Device device, std::optional<HostClock> clock) {
  return std::make_shared<AcceleratorStreams>(device, std::move(clock));
}

} // namespace memplug
