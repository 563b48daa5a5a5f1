// The process's arena: which requests it is asked to serve, and how the recorder learns of its blocks.
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

// Makes this device's arena the process's, creating it where needed. `device` must live for ever. `checks`: see Arena.
Arena& open_arena(ArenaDevice& device, bool checks);

// Returns the process's arena; null if none was made yet.
Arena* the_arena();

// Returns the arena that owns the address, or null.
Arena* arena_of(const void* pointer);

// Returns the server through which the devices' allocators ask the arena (server.h).
Server& arena_server();

// Leaves requests of these passes (bit n: pass n) to the native allocator from the next `serve(true)` on (server.h).
void withhold(int32_t passes);

// Return the bytes that all arenas have reserved now, and the bytes of their blocks in use, as requested.
int64_t reserved_bytes();
int64_t live_bytes();

void lock_arenas_for_fork();
void unlock_arenas_after_fork();

// The common part of devices: reports blocks to the recorder and to torch's profiler.
class RecordingDevice : public ArenaDevice {
 public:
  explicit RecordingDevice(c10::Device device) : device_(device) {}
  bool handed_out(void* pointer, size_t nbytes, Stream stream) override;
  void came_back(void* pointer, size_t nbytes, bool wanted, bool open) override;

 private:
  void profile(void* pointer, int64_t change);

  const c10::Device device_;
  std::atomic<int64_t> in_use_bytes_{0}; // in all arenas of the device
};

// A device whose arenas lie in blocks of torch's own allocator.
class NativeBlockDevice : public RecordingDevice {
 public:
  using RecordingDevice::RecordingDevice;
  void release(char* begin) override;

 protected:
  // Holds the block until `begin`, an address within it, is released.
  char* hold(char* begin, c10::DataPtr block);

 private:
  std::mutex mutex_;
  std::map<char*, c10::DataPtr> blocks_; // by address of the memory reserved in each
};

// The CPU's device; all of its streams are one.
ArenaDevice& cpu_device();
ArenaDevice& other_device(); // of other vendors' devices, see `install_other`
#ifdef MEMPLUG_CUDA
ArenaDevice& cuda_device(int index); // throws if this version of torch has calls that memplug does not know
#endif

} // namespace memplug
