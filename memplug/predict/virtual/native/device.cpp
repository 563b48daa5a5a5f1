#include "device.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/mman.h>

#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace memplug {
namespace {

thread_local int64_t current = 0;

Clocks& clocks() {
  return VirtualDevice::get().clocks;
}

struct VirtualEvent {
  double at_s = 0;
  int64_t era = 0;

  // Returns the time at which the event completes; zero if the clocks were restarted after it was recorded.
  double over_s() const {
    return era == clocks().era() ? at_s : 0;
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kVirtual;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Device getDevice() const override {
    return c10::Device(kVirtual, 0);
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return stream(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(clocks().make_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(clocks().make_stream());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current, next.id()));
  }
  bool queryStream(const c10::Stream& of) const override {
    return clocks().over_s(of.id()) <= clocks().host_s();
  }
  void synchronizeStream(const c10::Stream& of) const override {
    clocks().wait(clocks().over_s(of.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    clocks().wait(clocks().all_over_s());
  }
  void recordDataPtrOnStream(const c10::DataPtr& block, const c10::Stream& of) const override {
    if (block.get() != nullptr) {
      VirtualDevice::get().memory.use_on(block.get(), of.id());
    }
  }

  void record(void** event, const c10::Stream& of, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new VirtualEvent();
    }
    *static_cast<VirtualEvent*>(*event) = {clocks().over_s(of.id()), clocks().era()};
  }
  void block(void* event, const c10::Stream& of) const override {
    if (event != nullptr) {
      clocks().wait(of.id(), at_s(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || at_s(event) <= clocks().host_s();
  }
  void synchronizeEvent(void* event) const override {
    clocks().wait(event == nullptr ? 0 : at_s(event));
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return (at_s(end) - at_s(begin)) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<VirtualEvent*>(event);
  }

 private:
  static c10::Stream stream(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kVirtual, 0), id);
  }
  static double at_s(const void* event) {
    return static_cast<const VirtualEvent*>(event)->over_s();
  }
};

class VirtualAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* const address =
        nbytes == 0 ? nullptr : VirtualDevice::get().memory.malloc(static_cast<int64_t>(nbytes), current);
    return {address, address, &give_back, c10::Device(kVirtual, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void*, const void*, size_t) const override {}

 private:
  static void give_back(void* address) {
    if (address != nullptr) {
      VirtualDevice::get().memory.free(address);
    }
  }
};

// Allocates pinned host memory. Nothing writes to it, so its pages take no physical memory.
class HostAddresses final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    void* const begin = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) {
      throw std::bad_alloc();
    }
    return {begin, new Mapped{begin, nbytes}, &unmap, c10::Device(c10::kCPU)};
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    default_copy_data(destination, source, nbytes);
  }

 private:
  struct Mapped {
    void* begin;
    size_t nbytes;
  };
  static void unmap(void* context) {
    const std::unique_ptr<Mapped> mapped(static_cast<Mapped*>(context));
    munmap(mapped->begin, mapped->nbytes);
  }
};

class VirtualDeviceHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* instance = new HostAddresses();
    return instance;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kVirtual, 0);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU)); // no kernel draws from it
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* const impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::GetAllocator(kVirtual)->allocate(nbytes));
    impl->set_nbytes(nbytes);
  }
};

std::string described(const Work& work) {
  std::ostringstream key;
  key << work.name << work.causal;
  for (const auto* const tensors : {&work.inputs, &work.outputs}) {
    key << '|';
    for (const TensorShape& tensor : *tensors) {
      key << tensor.dtype << tensor.contiguous;
      for (const int64_t size : tensor.sizes) {
        key << ',' << size;
      }
      key << ';';
    }
  }
  return key.str();
}

} // namespace

VirtualDevice& VirtualDevice::get() {
  static auto* instance = new VirtualDevice(); // never destroyed, because storages outlive static destruction
  return *instance;
}

int64_t current_stream() {
  return current;
}

c10::Allocator& virtual_allocator() {
  static auto* instance = new VirtualAllocator();
  return *instance;
}

void VirtualDevice::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_started_) {
    return;
  }
  if (at::isPrivateUse1HooksRegistered() || c10::impl::hasDeviceGuardImpl(kVirtual)) {
    throw std::runtime_error("another device is registered in the virtual device's slot in torch (PrivateUse1)");
  }
  c10::impl::registerDeviceGuard(kVirtual, new Guard());
  c10::SetAllocator(kVirtual, &virtual_allocator());
  at::RegisterPrivateUse1HooksInterface(new VirtualDeviceHooks());
  register_operators();
  is_started_ = true;
}

void VirtualDevice::set_costs(Costs costs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  costs_ = std::move(costs);
  known_.clear();
}

void VirtualDevice::answer_by(Answers answers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answers_ = std::move(answers);
}

std::optional<std::vector<at::Tensor>> VirtualDevice::answer(const Work& work, bool waits) {
  const at::DisableRecordFunctionGuard apart; // observers must not see the operators that Python runs to make an answer
  Answers answers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    answers = answers_;
  }
  return answers ? answers(work, waits) : std::nullopt;
}

// Does not hold `mutex_` while it calls Python, because a thread that holds Python's lock may be waiting for `mutex_`.
void VirtualDevice::run(const Work& work) {
  const std::string key = described(work);
  Costs costs;
  std::optional<Cost> cost;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    costs = costs_;
    if (const auto known = known_.find(key); known != known_.end()) {
      cost = known->second;
      flops_ += cost->flops;
    }
  }
  if (!cost) {
    cost = costs.kernel ? costs.kernel(work) : Cost{};
    const std::lock_guard<std::mutex> lock(mutex_);
    known_[key] = *cost;
    flops_ += cost->flops;
  }
  launch(work.name, cost->seconds);
}

void VirtualDevice::restart() {
  memory.restart();
  clocks.restart();
  const std::lock_guard<std::mutex> lock(mutex_);
  flops_ = 0;
}

double VirtualDevice::flops() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return flops_;
}

void VirtualDevice::launch(const std::string& name, double seconds) {
  double launch_s = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    launch_s = costs_.launch_s;
  }
  clocks.spend(launch_s);
  clocks.launch(current, seconds, name);
}

void VirtualDevice::copy(CopyDirection direction, int64_t nbytes, bool blocks) {
  Costs costs;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    costs = costs_;
  }
  clocks.spend(costs.launch_s);
  const double over_s = clocks.copy(current, direction, costs.copy ? costs.copy(direction, nbytes) : CopySeconds{});
  if (blocks) {
    clocks.wait(over_s);
  }
}

} // namespace memplug
