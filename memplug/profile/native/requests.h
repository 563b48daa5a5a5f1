// Records every malloc and free of the training device while a recording runs, in program order.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace memplug {

// Same layout as REQUEST_EVENT in memplug/profile/trace.py, but `phase` is a result of `pack` (sequence.h).
#pragma pack(push, 1)
struct RequestEvent {
  int32_t kind; // 0 malloc, 1 free
  int64_t request; // number of the malloc in this recording; -1: the block was allocated before the recording
  int64_t nbytes; // of a malloc: bytes requested; of a free: 0, or the size of a block from before the recording
  int64_t stream;
  int64_t operator_index;
  int32_t phase;
  int32_t layer;
  int32_t thread;
};
#pragma pack(pop)

struct Usage {
  int64_t base_bytes; // bytes in use when the recording began
  int64_t in_use_bytes;
  int64_t peak_bytes;
  int64_t marked_peak_bytes; // peak since `mark_peak`, or since the recording began
};

// Begins a recording. `base_bytes`: bytes in use on the device now, as its allocator counts them. If the allocator does
// not count, -1; `base_of_recording` then tells which bytes the recording begins with. A free is recorded if and only
// if its malloc was recorded or the recording began with the block's bytes. So bytes in use never become negative.
void begin_requests(int64_t base_bytes);
void end_requests();
bool recording_requests();

// The bytes that a recording begins with. TRACKED: live blocks of earlier recordings, and the arena's. LIMIT: the bytes
// that the CPU's limit counts, and the arena's. DEVICE: all bytes that the device's allocator counts.
// `base_of_recording` returns the base of the running or last recording.
enum class Base { TRACKED, LIMIT, DEVICE };
Base base_of_recording();

// Records a malloc. `stream` is any identifier of the stream; streams get numbers in order of appearance, and keep them
// in later recordings until `forget_streams`, so that steps can be compared. Returns whether the caller must report the
// block's free (`note_free`), even after the recording.
bool note_malloc(void* pointer, size_t nbytes, const void* stream);
// Records a free. `nbytes` matters only for a block from before the recording: the block's size if the recording began
// with its bytes, else 0.
void note_free(void* pointer, size_t nbytes);

// While an instance made with `on` lives, mallocs and frees of the calling thread are not recorded, so the recording
// shows the step as if no block had been moved.
class Moving {
 public:
  explicit Moving(bool on);
  ~Moving();
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  const bool before_;
};

// Gives a recorded block a new address.
void note_moved(void* from, void* to);

// Notes that memplug has moved so many bytes off the device (negative: back). Later recordings count them as in use.
void note_moved_out(int64_t nbytes);

// A watcher of requests to an allocator in front of torch's (`User`), called on any thread: before each request is
// served, with `memory` null, and afterwards, with the memory that serves it. `watch_requests(nullptr)` removes the
// watcher.
using RequestWatcher = void (*)(size_t nbytes, const void* stream, const void* memory);
void watch_requests(RequestWatcher watcher);
RequestWatcher request_watcher();

// Returns the block that `serve()` returns, and notifies the watcher before and after.
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

// Forgets all recorded blocks: nothing will report their frees, so the recorder no longer knows which blocks live.
void forget_blocks();
// Numbers streams from 0 again.
void forget_streams();

// Returns the bytes of all live recorded blocks, including those of earlier recordings.
int64_t tracked_bytes();
Usage usage();
void mark_peak();
int64_t in_use_bytes(); // `usage().in_use_bytes`, without taking the lock
std::vector<RequestEvent> take_requests();

// Around a fork: the child must not inherit a lock that another thread held.
void lock_requests_for_fork();
void unlock_requests_after_fork();

// Install and remove memplug's allocator in front of torch's CPU allocator. `user` is the part of memplug that needs
// it; a second `install_cpu` for the same user throws. Requests that no arena serves go on to torch's allocator.
enum User : int { RECORDER = 1, ARENA = 2, RELIEF = 4 };
void install_cpu(User user);
void uninstall_cpu(User user);
c10::Allocator& native_cpu_allocator(); // torch's allocator behind memplug's

// The same for a device that torch knows only by its type (PrivateUse1), such as the virtual device.
void install_other(User user);
void uninstall_other(User user);
c10::Allocator& native_other_allocator();
const void* current_other_stream();

// Limits the CPU's memory when the CPU stands in for a device; -1: no limit. Blocks that are requested from now on may
// take `nbytes` in total at any time; a request for more fails as on a device. Memory that an arena reserves and blocks
// that an arena serves do not count.
void limit_cpu(int64_t nbytes);

// Adds a block that was requested before the limit to the bytes in use. Does nothing if the block counts already, or if
// there is no limit.
void count_cpu(c10::DataPtr& block, int64_t nbytes);

struct CpuBytes {
  // `in_use`: bytes of requests under the limit, and of blocks passed to `count_cpu`; `peak`: since the limit was set
  int64_t in_use, peak;
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
