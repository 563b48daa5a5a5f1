// Every malloc and free of the training device while a recording runs, in program order.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

// Packed as REQUEST_EVENT in memplug/profile/trace.py; `phase` still in the form that `pack` gives.
#pragma pack(push, 1)
struct RequestEvent {
  int32_t kind; // 0 malloc, 1 free
  int64_t request; // running number; -1: allocated before the recording
  int64_t nbytes; // as asked for; of a free: 0, or of a block from before the recording its size
  int64_t stream;
  int64_t operator_index;
  int32_t phase;
  int32_t layer;
  int32_t thread;
};
#pragma pack(pop)

struct Usage {
  int64_t base_bytes; // in use when the recording began
  int64_t in_use_bytes;
  int64_t peak_bytes;
  int64_t marked_peak_bytes; // since `mark_peak`, or the recording's beginning
};

// Begin a recording. `base_bytes`: in use on the device now, as its allocator counts, of which what was recorded earlier
// and is still alive is part; -1: where nothing counts, that and the arena's alone, or what a limit of the CPU counts. A
// free is noted if, and only if, its bytes are part of that, or its malloc was noted: so never more is freed than there is.
void begin_requests(int64_t base_bytes);
void end_requests();
bool recording_requests();

// What a recording begins with: blocks that were recorded earlier, and the arena's; what a limit of the CPU counts, and the
// arena's; all that the device's allocator counts. Of the one that runs now, or ran last.
enum class Base { TRACKED, LIMIT, DEVICE };
Base base_of_recording();

// What an allocator saw. `stream` is any name of it; streams are numbered in order of appearance.
// Returns whether it was noted, and its free is to be told, recording or not.
bool note_malloc(void* pointer, size_t nbytes, const void* stream);
// `nbytes`: size of the block where it is part of what a recording begins with; only used for blocks from before it.
void note_free(void* pointer, size_t nbytes);

// While one lives, what the calling thread asks for and gives back is not noted, if `on`: the step is recorded as if it
// had not happened.
class Moving {
 public:
  explicit Moving(bool on);
  ~Moving();
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  const bool before_;
};

// A block that was noted is at another address from now on.
void note_moved(void* from, void* to);

// So many bytes more are not on the device although, to a recording, they are: what begins now has them in use.
void note_moved_out(int64_t nbytes);

// Told of every request that goes to the CPU's allocator, or to the device's that memplug stands in front of (`User`): of its
// bytes before it is served, of its memory after that. Of any thread; null: none is.
using RequestWatcher = void (*)(size_t nbytes, const void* stream, const void* memory);
void watch_requests(RequestWatcher watcher);
RequestWatcher request_watcher();

// What `serve()` gives, a block, and the watcher is told of it.
template <typename Stream, typename Serve>
auto watched(size_t nbytes, const Stream& stream, const Serve& serve) {
  const RequestWatcher watcher = request_watcher();
  if (watcher == nullptr || nbytes == 0) {
    return serve();
  }
  const void* const on = stream();
  watcher(nbytes, on, nullptr);
  auto block = serve();
  watcher(nbytes, on, block.get());
  return block;
}

// No frees will be seen any more: what is alive now is unknown from here on.
void forget_blocks();

// Bytes of blocks that were recorded, ever, and are still alive.
int64_t tracked_bytes();
Usage usage();
void mark_peak();
int64_t in_use_bytes(); // without a lock
std::vector<RequestEvent> take_requests();

// Around a fork: the child must not inherit a lock that another thread held.
void lock_requests_for_fork();
void unlock_requests_after_fork();

// The allocators, which delegate requests that no arena serves. A second `install` for the same user throws.
enum User : int { RECORDER = 1, ARENA = 2, RELIEF = 4 };
void install_cpu(User user);
void uninstall_cpu(User user);
c10::Allocator& native_cpu_allocator(); // behind what stands in front of it

// The allocator of a device that torch knows by its type alone (PrivateUse1), as the virtual one.
void install_other(User user);
void uninstall_other(User user);
c10::Allocator& native_other_allocator();
const void* current_other_stream();

// A CPU that stands in for a device: what is asked for from now on may take so many bytes at a time, and a request beyond
// fails as one of a device does; -1: no limit. Memory that an arena reserves does not count, nor what it serves.
void limit_cpu(int64_t nbytes);

// A block that was there before the limit counts as well from now on; nothing where it does already, or nothing counts.
void count_cpu(c10::DataPtr& block, int64_t nbytes);

struct CpuBytes {
  int64_t in_use, peak; // of what was asked for under a limit, and what counts besides; the peak since the limit was set
};
CpuBytes cpu_bytes();
bool is_cpu_limited();
void lock_cpu_for_fork();
void unlock_cpu_after_fork();
#ifdef MEMPLUG_CUDA
void install_cuda(int device);
void uninstall_cuda();
#endif

} // namespace memplug
