// The arena's device on CUDA: memory of torch's CUDA allocator, and events of streams.
#include "blocks.h"
#include "cuda_memory.h"

#ifdef MEMPLUG_CUDA_ARENA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "serving.h"

namespace memplug {
namespace {

class CudaArenaDevice final : public RecordingDevice {
 public:
  explicit CudaArenaDevice(int index)
      : RecordingDevice(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index))), index_(index) {}

  int index() const {
    return index_;
  }

  char* reserve(size_t nbytes) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index_));
    const Unheard unheard;
    auto* const begin = static_cast<char*>(native_cuda_allocator().raw_alloc(nbytes));
    note_arena_memory(++parts_);
    return begin;
  }
  Stream current_stream() override {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index_)).stream();
  }
  void release(char* memory) override {
    const Unheard unheard;
    native_cuda_allocator().raw_delete(memory);
    note_arena_memory(--parts_);
  }

  bool handed_out(void* pointer, size_t nbytes, Stream stream) override {
    use(static_cast<int64_t>(nbytes), 1);
    return RecordingDevice::handed_out(pointer, nbytes, stream);
  }
  void came_back(void* pointer, size_t nbytes, bool wanted, bool open) override {
    use(static_cast<int64_t>(nbytes), -1);
    RecordingDevice::came_back(pointer, nbytes, wanted, open);
  }

  Event record(Stream stream) override {
    auto* const event = new Queued{to_cuda(stream)};
    event->try_record(index_);
    return event;
  }
  void wait(Stream stream, Event event) override {
    auto* const queued = static_cast<Queued*>(event);
    if (queued->try_record(index_)) {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index_));
      C10_CUDA_CHECK(cudaStreamWaitEvent(to_cuda(stream), queued->event, 0));
    }
  }
  bool is_done(Event event) override {
    auto* const queued = static_cast<Queued*>(event);
    if (!queued->try_record(index_)) {
      return false;
    }
    const cudaError_t state = cudaEventQuery(queued->event);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    C10_CUDA_CHECK(state);
    return true;
  }
  void drop(Event event) override {
    delete static_cast<Queued*>(event);
  }
  void synchronize() override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index_));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }

  void fill(char* begin, size_t nbytes, int byte, Stream stream) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index_));
    C10_CUDA_CHECK(cudaMemsetAsync(begin, byte, nbytes, to_cuda(stream)));
  }
  bool is_filled(const char* begin, size_t nbytes, int byte, Stream stream) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index_));
    std::vector<char> copy(nbytes);
    C10_CUDA_CHECK(cudaMemcpyAsync(copy.data(), begin, nbytes, cudaMemcpyDeviceToHost, to_cuda(stream)));
    C10_CUDA_CHECK(cudaStreamSynchronize(to_cuda(stream)));
    return std::all_of(copy.begin(), copy.end(), [&](char c) { return c == static_cast<char>(byte); });
  }

 private:
  // An event that belongs to no graph. It cannot be recorded while its stream captures a graph, so it is recorded once
  // the capture has ended.
  struct Queued {
    explicit Queued(cudaStream_t of) : stream(of) {}
    ~Queued() {
      if (event != nullptr) {
        (void)cudaEventDestroy(event);
      }
    }
    bool try_record(int device) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      if (recorded || cudaStreamIsCapturing(stream, &capture) != cudaSuccess ||
          capture != cudaStreamCaptureStatusNone) {
        return recorded;
      }
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
      if (event == nullptr) {
        C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      }
      C10_CUDA_CHECK(cudaEventRecord(event, stream));
      recorded = true;
      return true;
    }
    cudaStream_t stream;
    cudaEvent_t event = nullptr;
    bool recorded = false;
  };

  static cudaStream_t to_cuda(Stream stream) {
    return static_cast<cudaStream_t>(const_cast<void*>(stream));
  }

  void use(int64_t nbytes, int sign) {
    live_bytes_ += sign * nbytes;
    live_size_ += sign * in_blocks(nbytes);
    note_arena_use(live_bytes_, live_size_);
  }

  const int index_;
  std::atomic<int> parts_{0};
  int64_t live_bytes_ = 0;
  int64_t live_size_ = 0;
};

} // namespace

ArenaDevice& cuda_device(int index) {
  static auto* const instance = new CudaArenaDevice(index);
  if (instance->index() != index) {
    throw std::runtime_error("another device of this process has one");
  }
  prepare_cuda_allocator(index);
  return *instance;
}

} // namespace memplug

#endif
