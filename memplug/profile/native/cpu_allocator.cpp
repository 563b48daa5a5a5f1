// memplug's allocator in front of torch's CPU allocator. With it, a machine without a GPU records and serves requests
// by the same code as a machine with a GPU.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ScopeExit.h>

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "relief.h"
#include "requests.h"
#include "server.h"

namespace memplug {
namespace {

c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_deleter = nullptr;
int wanted_by = 0; // a bit for each `User` that wants this allocator

// Counts the CPU's bytes in use, and holds the limit of `limit_cpu`.
class Limited {
 public:
  bool is_on() const {
    return limit_.load(std::memory_order_relaxed) >= 0;
  }

  void set(int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    limit_ = nbytes;
    bytes_.peak = bytes_.in_use;
  }

  // Adds bytes to those in use; returns false, and adds nothing, if they would exceed the limit.
  bool take(int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_on() && bytes_.in_use + nbytes > limit_) {
      return false;
    }
    bytes_.in_use += nbytes;
    bytes_.peak = std::max(bytes_.peak, bytes_.in_use);
    return true;
  }

  // Takes back what `take` added for a block that was not allocated, or that cannot be followed.
  void give_back(int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    bytes_.in_use -= nbytes;
  }

  void add(void* block, int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    sizes_[block] = nbytes;
  }

  // Adds a block that was allocated before the limit was set, with its bytes.
  void add_former(void* block, int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    sizes_[block] = nbytes;
    bytes_.in_use += nbytes;
    bytes_.peak = std::max(bytes_.peak, bytes_.in_use);
  }

  // Removes a block and returns its bytes; 0 if the block was not counted.
  int64_t remove(void* block) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = sizes_.find(block);
    if (found == sizes_.end()) {
      return 0;
    }
    const int64_t nbytes = found->second;
    bytes_.in_use -= nbytes;
    sizes_.erase(found);
    return nbytes;
  }

  CpuBytes bytes() {
    const std::lock_guard<std::mutex> lock(mutex);
    return bytes_;
  }

  std::mutex mutex;

 private:
  std::atomic<int64_t> limit_{-1};
  CpuBytes bytes_{0, 0};
  ska::flat_hash_map<void*, int64_t> sizes_;
};

Limited& limited() {
  static auto* instance = new Limited(); // never destroyed: blocks may be freed after static destruction
  return *instance;
}

void free_noted(void* pointer) {
  const int64_t counted = limited().remove(pointer);
  note_free(pointer, base_of_recording() == Base::LIMIT ? counted : 0);
  native_deleter(pointer);
}

// Frees a block of the server or of the native allocator; for `raw_deallocate`, which does not use the block's deleter.
void free_any(void* pointer) {
  if (!server().give_back(pointer)) {
    free_noted(pointer);
  }
}

class DelegatingAllocator final : public c10::Allocator {
 public:
  // Returns a block of the server if it serves the request, otherwise a native block. A native block that is recorded
  // or counted gets a deleter that reports its free, even after the recording. Other native blocks stay untouched.
  c10::DataPtr allocate(size_t nbytes) override {
    return watched(nbytes, [] { return nullptr; }, [nbytes] { return serve(nbytes); });
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

 private:
  static c10::DataPtr serve(size_t nbytes) {
    if (serving()) {
      if (void* block = server().serve(nbytes, nullptr)) {
        return {block, block, &give_back_served, c10::Device(c10::DeviceType::CPU)};
      }
    }
    if (limited().is_on() && nbytes > 0) {
      return with_relief(nbytes, [&] { return noted(nbytes, allocate_limited(nbytes)); });
    }
    return noted(nbytes, native->allocate(nbytes));
  }

  static c10::DataPtr noted(size_t nbytes, c10::DataPtr block) {
    if (nbytes > 0 && recording_requests() && block.get() == block.get_context() &&
        (block.get_deleter() == &free_noted || block.compare_exchange_deleter(native_deleter, &free_noted))) {
      note_malloc(block.get(), nbytes, nullptr);
    }
    return block;
  }

  static c10::DataPtr allocate_limited(size_t nbytes) {
    const auto size = static_cast<int64_t>(nbytes);
    if (!limited().take(size)) {
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "CPU out of memory. Tried to allocate ",
          nbytes,
          " bytes, and ",
          limited().bytes().in_use,
          " are in use (\"device_budget_gib\" of memplug)");
    }
    bool counts = false;
    const auto uncount = c10::make_scope_exit([&] {
      if (!counts) {
        limited().give_back(size);
      }
    });
    c10::DataPtr block = native->allocate(nbytes);
    if (block.get() == block.get_context() && block.compare_exchange_deleter(native_deleter, &free_noted)) {
      limited().add(block.get(), size);
      counts = true;
    }
    return block;
  }
};

DelegatingAllocator& delegating() {
  static auto* instance = new DelegatingAllocator(); // never destroyed: storages keep a pointer to their allocator
  return *instance;
}

} // namespace

void install_cpu(User user) {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &delegating()) {
    if ((wanted_by & user) != 0) {
      throw std::runtime_error("memplug has already put its allocator in front of the CPU's");
    }
    wanted_by |= user;
    return;
  }
  if (current->raw_deleter() == nullptr) {
    throw std::runtime_error("the CPU's allocator has blocks whose frees memplug cannot see");
  }
  native = current;
  native_deleter = current->raw_deleter();
  c10::SetCPUAllocator(&delegating());
  if (c10::GetCPUAllocator() != &delegating()) {
    throw std::runtime_error("the CPU's allocator was set by another library with a higher priority");
  }
  wanted_by = user;
}

c10::Allocator& native_cpu_allocator() {
  return native != nullptr ? *native : *c10::GetCPUAllocator();
}

void uninstall_cpu(User user) {
  wanted_by &= ~user;
  if (wanted_by == 0 && c10::GetCPUAllocator() == &delegating()) {
    c10::SetCPUAllocator(native);
  }
}

void limit_cpu(int64_t nbytes) {
  const bool is_user = (wanted_by & RELIEF) != 0 && c10::GetCPUAllocator() == &delegating();
  if (nbytes >= 0 && !is_user) {
    install_cpu(RELIEF);
  }
  limited().set(nbytes);
  if (nbytes < 0 && is_user) {
    uninstall_cpu(RELIEF);
  }
}

void count_cpu(c10::DataPtr& block, int64_t nbytes) {
  if (limited().is_on() && nbytes > 0 && block.get() == block.get_context() &&
      block.compare_exchange_deleter(native_deleter, &free_noted)) {
    limited().add_former(block.get(), nbytes);
  }
}

CpuBytes cpu_bytes() {
  return limited().bytes();
}

bool is_cpu_limited() {
  return limited().is_on();
}

void lock_cpu_for_fork() {
  limited().mutex.lock();
}

void unlock_cpu_after_fork() {
  limited().mutex.unlock();
}

} // namespace memplug
