// The process's arena: chooses the requests that it serves, and reports its blocks to the recorder.
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

// Makes the arena of `device` with these checks (see Arena) the process's arena, and returns it; creates it if needed.
// `device` must never be destroyed.
Arena& open_arena(ArenaDevice& device, bool checks);

// Returns the process's arena, or null before the first `open_arena`.
Arena* the_arena();

// Returns the arena that has reserved the address, or null.
Arena* arena_of(const void* pointer);

// Returns the server (server.h) by which the devices' allocators request memory from the arena.
Server& arena_server();

// Leaves requests in these passes (bit n: pass n) to the native allocator. Call it before `serve(true)` (server.h).
void withhold(int32_t passes);

// Sums over all arenas of the process: bytes reserved now, and bytes in use now, as requested.
int64_t reserved_bytes();
int64_t live_bytes();

void lock_arenas_for_fork();
void unlock_arenas_after_fork();

// Base class of all devices: reports blocks to the recorder and to torch's profiler.
class RecordingDevice : public ArenaDevice {
 public:
  explicit RecordingDevice(c10::Device device) : device_(device) {}
  bool handed_out(void* pointer, size_t nbytes, Stream stream) override;
  void came_back(void* pointer, size_t nbytes, bool wanted, bool open) override;

 private:
  void profile(void* pointer, int64_t change);

  const c10::Device device_;
  std::atomic<int64_t> in_use_bytes_{0}; // bytes in use in all arenas of the device
};

// A device whose arenas lie in blocks of torch's own allocator.
class NativeBlockDevice : public RecordingDevice {
 public:
  using RecordingDevice::RecordingDevice;
  void release(char* begin) override;

 protected:
  // Keeps `block` until `release(begin)`, and returns `begin`, an address within the block.
  char* hold(char* begin, c10::DataPtr block);

 private:
  std::mutex mutex_;
  std::map<char*, c10::DataPtr> blocks_; // by the address that `reserve` returned
};

ArenaDevice& cpu_device(); // has a single stream
ArenaDevice& other_device(); // for other vendors' devices, see `install_other`
#ifdef MEMPLUG_CUDA
// throws if another device of this process has an arena, or if memplug does not know this torch's CUDA allocator
ArenaDevice& cuda_device(int index);
#endif

} // namespace memplug
