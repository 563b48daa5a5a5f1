// The allocator of a device that torch knows by its type alone, stood in front of, and what an arena needs of that device. A block
// of the native allocator's keeps its context, and has a deleter that notes its free.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "relief.h"
#include "requests.h"
#include "serving.h"

namespace memplug {
namespace {

constexpr auto kOther = c10::DeviceType::PrivateUse1;

c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_deleter = nullptr;
int wanted_by = 0; // a bit for each `User`

// Bytes of blocks whose free is noted, as asked for.
class Sizes {
 public:
  void add(void* block, int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    nbytes_[block] = nbytes;
  }
  int64_t remove(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = nbytes_.find(block);
    const int64_t nbytes = found->second;
    nbytes_.erase(found);
    return nbytes;
  }

 private:
  std::mutex mutex_;
  ska::flat_hash_map<void*, int64_t> nbytes_;
};

Sizes& sizes() {
  static auto* instance = new Sizes(); // never destroyed: blocks may be freed after static destruction
  return *instance;
}

void free_noted(void* block) {
  note_free(block, static_cast<size_t>(sizes().remove(block)));
  native_deleter(block);
}

const c10::impl::DeviceGuardImplInterface& guard() {
  return *c10::impl::getDeviceGuardImpl(kOther);
}

const void* current_stream() {
  return reinterpret_cast<const void*>(guard().getStream(guard().getDevice()).id());
}

class Front final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return watched(nbytes, &current_stream, [&]() -> c10::DataPtr {
      if (serving()) {
        if (void* block = serve_request(nbytes, current_stream())) {
          return {block, block, &give_back_served, c10::Device(kOther, 0)};
        }
      }
      return with_relief(nbytes, [&] { return noted(nbytes, native->allocate(nbytes)); });
    });
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return native->raw_deleter();
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    native->copy_data(destination, source, nbytes);
  }

 private:
  static c10::DataPtr noted(size_t nbytes, c10::DataPtr block) {
    if (nbytes > 0 && block.get() == block.get_context() && block.compare_exchange_deleter(native_deleter, &free_noted)) {
      sizes().add(block.get(), static_cast<int64_t>(nbytes));
      note_malloc(block.get(), nbytes, current_stream());
    }
    return block;
  }
};

Front& front() {
  static auto* instance = new Front(); // never destroyed: storages keep a pointer to their allocator
  return *instance;
}

// By what every such device tells torch. Nothing is ever written to its memory, so that there is nothing to check.
class OtherDevice final : public NativeBlockDevice {
 public:
  OtherDevice() : NativeBlockDevice(c10::Device(kOther, 0)) {}

  // The native allocator's, which nothing may stand in front of yet.
  char* reserve(size_t nbytes) override {
    c10::Allocator* const allocator = native != nullptr ? native : c10::GetAllocator(kOther);
    c10::DataPtr memory = allocator->allocate(nbytes);
    auto* const begin = static_cast<char*>(memory.get());
    return hold(begin, std::move(memory));
  }

  Stream current_stream() override {
    return memplug::current_stream();
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
  static c10::Stream of(Stream stream) {
    const auto id = static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(stream));
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kOther, 0), id);
  }
};

} // namespace

void install_other(User user) {
  if (wanted_by == 0) {
    native = c10::GetAllocator(kOther);
    native_deleter = native->raw_deleter();
    if (native_deleter == nullptr) {
      throw std::runtime_error("the device's allocator gives out blocks whose frees cannot be seen");
    }
    c10::SetAllocator(kOther, &front());
  }
  wanted_by |= user;
}

void uninstall_other(User user) {
  const int before = std::exchange(wanted_by, wanted_by & ~user);
  if (before != 0 && wanted_by == 0 && c10::GetAllocator(kOther) == &front()) {
    c10::SetAllocator(kOther, native);
  }
}

Device& other_device() {
  static auto* instance = new OtherDevice();
  return *instance;
}

} // namespace memplug
