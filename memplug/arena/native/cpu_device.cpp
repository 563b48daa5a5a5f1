// The arena's device on the CPU: memory of torch's CPU allocator.
#include <cstring>
#include <utility>

#include "requests.h"
#include "serving.h"

namespace memplug {
namespace {

// All work happens at once and in program order, so there is nothing to wait for.
class CpuDevice final : public NativeBlockDevice {
 public:
  CpuDevice() : NativeBlockDevice(c10::Device(c10::DeviceType::CPU)) {}

  // Allocates with torch's CPU allocator, and aligns the memory itself.
  char* reserve(size_t nbytes) override {
    c10::DataPtr memory = native_cpu_allocator().allocate(nbytes + BLOCK_BYTES);
    const auto address = reinterpret_cast<intptr_t>(memory.get());
    char* const begin = reinterpret_cast<char*>(in_blocks(address));
    return hold(begin, std::move(memory));
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
};

} // namespace

ArenaDevice& cpu_device() {
  static auto* instance = new CpuDevice();
  return *instance;
}

} // namespace memplug
