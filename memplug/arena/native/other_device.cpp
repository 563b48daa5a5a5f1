// The arena's device for other vendors' devices (PrivateUse1): memory of torch's allocator, and events of streams.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>

#include "requests.h"
#include "serving.h"

namespace memplug {
namespace {

// Calls torch's interface for such devices. No kernel writes to the memory of the virtual device, so there is nothing
// to check.
class OtherDevice final : public NativeBlockDevice {
 public:
  OtherDevice() : NativeBlockDevice(c10::Device(c10::DeviceType::PrivateUse1, 0)) {}

  char* reserve(size_t nbytes) override {
    c10::DataPtr memory = native_other_allocator().allocate(nbytes);
    auto* const begin = static_cast<char*>(memory.get());
    return hold(begin, std::move(memory));
  }

  Stream current_stream() override {
    return current_other_stream();
  }
  Event record(Stream stream) override {
    Event event = nullptr;
    guard().record(&event, of(stream), 0, c10::EventFlag::PYTORCH_DEFAULT);
    return event;
  }
  void wait(Stream stream, Event event) override {
    guard().block(event, of(stream));
  }
  bool is_done(Event event) override {
    return guard().queryEvent(event);
  }
  void drop(Event event) override {
    guard().destroyEvent(event, 0);
  }
  void synchronize() override {
    guard().synchronizeDevice(0);
  }

  void fill(char*, size_t, int, Stream) override {}
  bool is_filled(const char*, size_t, int, Stream) override {
    return true;
  }

 private:
  static const c10::impl::DeviceGuardImplInterface& guard() {
    return *c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  }
  static c10::Stream of(Stream stream) {
    const auto id = static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(stream));
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, 0), id);
  }
};

} // namespace

ArenaDevice& other_device() {
  static auto* instance = new OtherDevice();
  return *instance;
}

} // namespace memplug
