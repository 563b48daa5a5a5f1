// memplug's allocator in front of the native one, which is torch's own for CUDA. If the server (server.h) serves a
// request, memplug's allocator returns the server's block, otherwise the native block, untouched. It overrides some
// calls, and hands all others on. If the installed version of torch has a call that hands_on.h does not know, memplug's
// allocator cannot be made; the recorder works all the same.
#include "cuda_memory.h"

#ifdef MEMPLUG_CUDA_ARENA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "hands_on.h"
#include "relief.h"
#include "server.h"

namespace memplug {
namespace {

using Native = caching::CUDAAllocator;
using DeviceStats = decltype(std::declval<Native&>().getDeviceStats(0));

// Replaces the server's reserved memory in the statistics by the bytes of its live blocks; `peak` is the peak of native
// and served bytes together.
void count_served(DeviceStats& stats, const Server::Bytes& served, const DeviceBytes& peak) {
  const auto count = [&](auto& stat, int64_t live, int64_t most) {
    stat.current += live - served.reserved;
    stat.peak = std::max(most, stat.current);
  };
  for (const size_t type : {AGGREGATE, LARGE_POOL}) {
    count(stats.requested_bytes[type], served.live, peak.requested);
    count(stats.allocated_bytes[type], served.live_size, peak.allocated);
    count(stats.active_bytes[type], served.live_size, peak.allocated);
  }
}

template <typename Base>
class InFront final : public HandsOn<Base> {
 public:
  InFront(Base* native, int device) : HandsOn<Base>(native), device_(device) {}

  c10::DataPtr allocate(size_t nbytes) override {
    return watched(nbytes, [] { return c10::cuda::getCurrentCUDAStream().stream(); }, [&] { return serve(nbytes); });
  }

  void* raw_alloc(size_t nbytes) override {
    // a native `raw_delete` may free this block, so the server must not serve it
    return with_relief(nbytes, [&] { return this->native_->raw_alloc(nbytes); });
  }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    return with_relief(nbytes, [&] { return this->native_->raw_alloc_with_stream(nbytes, stream); });
  }
  void raw_delete(void* block) override {
    if (!server().give_back(block)) {
      this->native_->raw_delete(block);
    }
  }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get() == nullptr || block.get_deleter() != &give_back_served || stream.device_index() != device_ ||
        !server().use_on(block.get(), stream.stream())) {
      this->native_->recordStream(block, stream);
    }
  }

  void* getBaseAllocation(void* block, size_t* nbytes) override {
    char* const reserved = server().reserved_with(block);
    return this->native_->getBaseAllocation(reserved != nullptr ? reserved : block, nbytes);
  }

  caching::ShareableHandle shareIpcHandle(void* block) override {
    char* const reserved = server().reserved_with(block);
    if (reserved == nullptr) {
      return this->native_->shareIpcHandle(block);
    }
    caching::ShareableHandle shared = this->native_->shareIpcHandle(reserved);
    shared.offset += static_cast<char*>(block) - reserved;
    return shared;
  }

  // The server does not serve requests to memory pools: CUDA graphs and the user's pools need memory of their own.
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter)
      override {
    this->native_->beginAllocateToPool(device, pool, std::move(filter));
    pools_ += device == device_;
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    this->native_->endAllocateToPool(device, pool);
    if (device == device_ && pools_ > 0) { // a pool may have begun before this allocator was installed
      --pools_;
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    DeviceStats stats = this->native_->getDeviceStats(device);
    const auto served = device == device_ ? server().bytes() : std::nullopt;
    if (served) {
      count_served(stats, *served, device_peak());
    }
    return stats;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    this->native_->resetPeakStats(device);
    if (device == device_) {
      reset_device_peak();
    }
  }

 private:
  c10::DataPtr serve(size_t nbytes) {
    if (serving() && pools_.load(std::memory_order_relaxed) == 0) {
      c10::DeviceIndex current = -1;
      C10_CUDA_CHECK(c10::cuda::GetDevice(&current));
      if (current == device_) {
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(current).stream();
        if (void* block = server().serve(nbytes, stream)) {
          return {block, block, &give_back_served, c10::Device(c10::DeviceType::CUDA, current)};
        }
      }
    }
    return with_relief(nbytes, [&] { return this->native_->allocate(nbytes); });
  }

  const int device_;
  std::atomic<int> pools_{0};
};

template <typename Base>
Base* in_front(Base* native, int device) {
  if constexpr (std::is_abstract_v<InFront<Base>>) {
    throw std::runtime_error("the allocator of this version of torch has calls that memplug does not know");
  } else {
    return new InFront<Base>(native, device); // never destroyed: torch may have kept a pointer to it
  }
}

Native* native_allocator = nullptr;
Native* standing = nullptr;
int standing_device = 0, used_by = 0; // `used_by`: a bit for each `User`
std::atomic<int> reserved_parts{0};
std::atomic<bool> leaves{false}; // remove memplug's allocator (`standing`) once the arena has no reserved memory left

bool swap(Native* expected, Native* wanted) {
  Native* current = expected;
  return caching::allocator.compare_exchange_strong(current, wanted) || current == wanted;
}

} // namespace

Native& native_cuda_allocator() {
  return *native_allocator;
}

void prepare_cuda_allocator(int device) {
  if (native_allocator == nullptr) {
    Native* const current = caching::allocator.load();
    standing = in_front(current, device);
    native_allocator = current;
    standing_device = device;
  }
}

void stand_before_cuda(User user, bool wanted) {
  const bool was_on = used_by != 0;
  used_by = wanted ? used_by | user : used_by & ~user;
  const bool on = used_by != 0;
  if (on && !was_on && !leaves) { // count anew: the native peak may have been reset in the meantime
    const DeviceStats stats = native_allocator->getDeviceStats(static_cast<c10::DeviceIndex>(standing_device));
    const auto& [requested, allocated] = std::tie(stats.requested_bytes[AGGREGATE], stats.allocated_bytes[AGGREGATE]);
    begin_device_peak(standing_device, {requested.current, allocated.current}, {requested.peak, allocated.peak});
  }
  leaves = !on && reserved_parts.load() > 0;
  if (!leaves && !swap(on ? native_allocator : standing, on ? standing : native_allocator)) {
    throw std::runtime_error("the CUDA allocator was changed by another library");
  }
}

void note_arena_memory(int parts) {
  reserved_parts = parts;
  if (parts == 0 && leaves.exchange(false)) {
    // fails, as it should, if another library has replaced this allocator since
    (void)swap(standing, native_allocator);
  }
}

} // namespace memplug

#endif
