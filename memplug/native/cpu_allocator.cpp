// The CPU's allocator, delegated to: what a machine without a GPU records, by the code that a GPU uses.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <stdexcept>

#include "requests.h"

namespace memplug {
namespace {

c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_deleter = nullptr;

void free_noted(void* pointer) {
  note_free(pointer, 0);
  native_deleter(pointer);
}

class DelegatingAllocator final : public c10::Allocator {
 public:
  // A block that is recorded gets a deleter that notes the free, for as long as it lives; any other stays untouched.
  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr block = native->allocate(nbytes);
    if (nbytes > 0 && recording_requests() && block.get() == block.get_context() &&
        block.compare_exchange_deleter(native_deleter, &free_noted)) {
      note_malloc(block.get(), nbytes, nullptr);
    }
    return block;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_noted; // frees an untouched block as well
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

} // namespace

void install_cpu() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &delegating()) {
    throw std::runtime_error("the CPU's allocator is delegated to already");
  }
  if (current->raw_deleter() == nullptr) {
    throw std::runtime_error("the CPU's allocator gives out blocks whose frees cannot be seen");
  }
  native = current;
  native_deleter = current->raw_deleter();
  c10::SetCPUAllocator(&delegating());
  if (c10::GetCPUAllocator() != &delegating()) {
    throw std::runtime_error("the CPU's allocator was set with a higher priority by somebody else");
  }
}

void uninstall_cpu() {
  if (c10::GetCPUAllocator() == &delegating()) {
    c10::SetCPUAllocator(native);
  }
}

} // namespace memplug
