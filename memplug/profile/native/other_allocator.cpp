// memplug's allocator in front of the native one, for a device that torch knows only by its type (PrivateUse1), such as
// the virtual device. Native blocks keep their context, but get a deleter that reports their free.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "relief.h"
#include "requests.h"
#include "server.h"

namespace memplug {
namespace {

constexpr auto kOther = c10::DeviceType::PrivateUse1;

c10::Allocator* native_other = nullptr;
c10::DeleterFnPtr native_other_deleter = nullptr;
int other_wanted_by = 0; // a bit for each `User` that wants this allocator

// Requested bytes of the blocks whose free this allocator reports.
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

void free_other(void* block) {
  note_free(block, static_cast<size_t>(sizes().remove(block)));
  native_other_deleter(block);
}

class Front final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return watched(nbytes, &current_other_stream, [&]() -> c10::DataPtr {
      if (serving()) {
        if (void* block = server().serve(nbytes, current_other_stream())) {
          return {block, block, &give_back_served, c10::Device(kOther, 0)};
        }
      }
      return with_relief(nbytes, [&] { return noted(nbytes, native_other->allocate(nbytes)); });
    });
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return native_other->raw_deleter();
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    native_other->copy_data(destination, source, nbytes);
  }

 private:
  static c10::DataPtr noted(size_t nbytes, c10::DataPtr block) {
    if (nbytes > 0 && block.get() == block.get_context() && block.compare_exchange_deleter(native_other_deleter, &free_other)) {
      sizes().add(block.get(), static_cast<int64_t>(nbytes));
      note_malloc(block.get(), nbytes, current_other_stream());
    }
    return block;
  }
};

Front& front() {
  static auto* instance = new Front(); // never destroyed: storages keep a pointer to their allocator
  return *instance;
}

} // namespace

void install_other(User user) {
  if (other_wanted_by == 0) {
    native_other = c10::GetAllocator(kOther);
    native_other_deleter = native_other->raw_deleter();
    if (native_other_deleter == nullptr) {
      throw std::runtime_error("the device's allocator has blocks whose frees memplug cannot see");
    }
    c10::SetAllocator(kOther, &front());
  }
  other_wanted_by |= user;
}

c10::Allocator& native_other_allocator() {
  return native_other != nullptr ? *native_other : *c10::GetAllocator(kOther);
}

const void* current_other_stream() {
  const c10::impl::DeviceGuardImplInterface& guard = *c10::impl::getDeviceGuardImpl(kOther);
  return reinterpret_cast<const void*>(guard.getStream(guard.getDevice()).id());
}

void uninstall_other(User user) {
  const int before = std::exchange(other_wanted_by, other_wanted_by & ~user);
  if (before != 0 && other_wanted_by == 0 && c10::GetAllocator(kOther) == &front()) {
    c10::SetAllocator(kOther, native_other);
  }
}

} // namespace memplug
