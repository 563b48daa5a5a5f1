// The process's arena: which requests it is asked for, and what the recorder hears of its blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "arena.h"
#include "server.h"

namespace memplug {

// The process's arena is from now on the one of this device, made where there was none. `device` lives for ever.
// `checks`: see Arena.
Arena& open_arena(Device& device, bool checks);

// Null: none was ever made.
Arena* the_arena();

// The arena that owns the address, or null.
Arena* arena_of(const void* pointer);

// What serves of it the requests that come to the devices' allocators.
Server& arena_server();

// From the next `serve(true)` on (server.h), requests of these passes, a bit each, are the native allocator's.
void withhold(int32_t passes);

// What all arenas have reserved now, and what is in use of it, as asked for.
int64_t reserved_bytes();
int64_t live_bytes();

void lock_arenas_for_fork();
void unlock_arenas_after_fork();

// What every device does alike: tells the recorder and torch's profiler of blocks.
class RecordingDevice : public Device {
 public:
  explicit RecordingDevice(c10::Device device) : device_(device) {}
  bool handed_out(void* pointer, size_t nbytes, Stream stream) override;
  void came_back(void* pointer, size_t nbytes, bool wanted, bool open) override;

 private:
  void profile(void* pointer, int64_t change);

  const c10::Device device_;
  std::atomic<int64_t> in_use_bytes_{0}; // of the device's arenas
};

// A device whose arenas lie in blocks of its native allocator.
class NativeBlockDevice : public RecordingDevice {
 public:
  using RecordingDevice::RecordingDevice;
  void release(char* begin) override;

 protected:
  // Holds the block until `begin`, an address within it, is released.
  char* hold(char* begin, c10::DataPtr block);

 private:
  std::mutex mutex_;
  std::map<char*, c10::DataPtr> blocks_; // by what was reserved of each
};

// Devices: `Device` of the CPU, whose streams are all one.
Device& cpu_device();
Device& other_device(); // see `install_other`
#ifdef MEMPLUG_CUDA
Device& cuda_device(int index); // throws where this version of torch has calls that are not known
#endif

} // namespace memplug
