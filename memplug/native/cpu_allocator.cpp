// The CPU's allocator, delegated to: what a machine without a GPU records and serves, by the code that a GPU uses.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "requests.h"
#include "serving.h"

namespace memplug {
namespace {

c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_deleter = nullptr;
int wanted_by = 0; // a bit for each `User`

void free_noted(void* pointer) {
  note_free(pointer, 0);
  native_deleter(pointer);
}

// What ends a block of any kind that comes without its own deleter.
void free_any(void* pointer) {
  Arena* const owner = arena_of(pointer);
  if (owner == nullptr || !owner->give_back(pointer)) {
    free_noted(pointer);
  }
}

class DelegatingAllocator final : public c10::Allocator {
 public:
  // A block of the arena, where it has one. Else the native one: with a deleter that notes the free for as long as it
  // lives, if it is recorded; any other stays untouched.
  c10::DataPtr allocate(size_t nbytes) override {
    if (serving()) {
      if (void* block = serve_request(nbytes, nullptr)) {
        return {block, block, &give_back_served, c10::Device(c10::DeviceType::CPU)};
      }
    }
    c10::DataPtr block = native->allocate(nbytes);
    if (nbytes > 0 && recording_requests() && block.get() == block.get_context() &&
        block.compare_exchange_deleter(native_deleter, &free_noted)) {
      note_malloc(block.get(), nbytes, nullptr);
    }
    return block;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_any;
  }

  bool is_simple_data_ptr(const c10::DataPtr& block) const override {
    return native->is_simple_data_ptr(block);
  }

  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    native->copy_data(destination, source, nbytes);
  }
};

DelegatingAllocator& delegating() {
  static auto* instance = new DelegatingAllocator(); // never destroyed: storages keep a pointer to their allocator
  return *instance;
}

// Everything happens at once and in program order, so there is nothing to wait for.
class CpuDevice final : public RecordingDevice {
 public:
  CpuDevice() : RecordingDevice(c10::Device(c10::DeviceType::CPU)) {}

  // The native allocator's, which nothing may stand in front of yet; aligned by hand.
  char* reserve(size_t nbytes) override {
    c10::Allocator* const allocator = native != nullptr ? native : c10::GetCPUAllocator();
    c10::DataPtr memory = allocator->allocate(nbytes + GRANULARITY);
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    char* const begin = reinterpret_cast<char*>((address + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.emplace(begin, std::move(memory));
    return begin;
  }

  void release(char* begin) override {
    c10::DataPtr memory;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = memory_.find(begin);
    memory = std::move(found->second);
    memory_.erase(found);
  }

  Stream current_stream() override {
    return nullptr;
  }

  Event record(Stream) override {
    return nullptr;
  }
  void wait(Stream, Event) override {}
  bool is_done(Event) override {
    return true;
  }
  void drop(Event) override {}
  void synchronize() override {}

  void fill(char* begin, size_t nbytes, int byte, Stream) override {
    std::memset(begin, byte, nbytes);
  }

  bool is_filled(const char* begin, size_t nbytes, int byte, Stream) override {
    return nbytes == 0 || (*begin == static_cast<char>(byte) && std::memcmp(begin, begin + 1, nbytes - 1) == 0);
  }

 private:
  std::mutex mutex_;
  std::map<char*, c10::DataPtr> memory_;
};

} // namespace

void install_cpu(User user) {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &delegating()) {
    if ((wanted_by & user) != 0) {
      throw std::runtime_error("the CPU's allocator is delegated to already");
    }
    wanted_by |= user;
    return;
  }
  if (current->raw_deleter() == nullptr) {
    throw std::runtime_error("the CPU's allocator gives out blocks whose frees cannot be seen");
  }
  native = current;
  native_deleter = current->raw_deleter();
  c10::SetCPUAllocator(&delegating());
  if (c10::GetCPUAllocator() != &delegating()) {
    throw std::runtime_error("the CPU's allocator was set by another library with a higher priority");
  }
  wanted_by = user;
}

void uninstall_cpu(User user) {
  wanted_by &= ~user;
  if (wanted_by == 0 && c10::GetCPUAllocator() == &delegating()) {
    c10::SetCPUAllocator(native);
  }
}

Device& cpu_device() {
  static auto* instance = new CpuDevice();
  return *instance;
}

} // namespace memplug
