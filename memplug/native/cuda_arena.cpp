// The CUDA allocator, stood in front of: blocks of the arena where it has one, else the native allocator's, untouched.
//
// Every call but those that the arena changes is handed on. Which calls there are differs between versions of torch:
// they are declared here without `override`, and handed on where the installed version knows them. Where it has one
// that this file does not know, the class stays abstract, and there is no arena; the recorder works all the same.
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
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "relief.h"
#include "serving.h"

namespace memplug {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Native = caching::CUDAAllocator;
using DeviceStats = decltype(std::declval<Native&>().getDeviceStats(0));

// Hand `NAME(ARGUMENTS)` on, of a native allocator that may not have it.
#define HAND_ON(NAME, ...)                                                                   \
  [&](auto* native) {                                                                        \
    if constexpr (requires { native->NAME(__VA_ARGS__); }) {                                 \
      return native->NAME(__VA_ARGS__);                                                      \
    } else {                                                                                 \
      throw std::logic_error("this version of torch has no " #NAME " with these arguments"); \
    }                                                                                        \
  }(this->native_)

// The type of the first argument, and of the result, of a member that the base may not have.
template <typename Result, typename Class, typename First, typename... Rest>
First first_of(Result (Class::*)(First, Rest...));
struct Unknown {};

template <typename Base, typename = void>
struct RejectionObserver {
  using type = Unknown;
};
template <typename Base>
struct RejectionObserver<Base, std::void_t<decltype(&Base::attachOomRejectionObserver)>> {
  using type = decltype(first_of(&Base::attachOomRejectionObserver));
};

template <typename Base, typename = void>
struct SegmentSizes {
  using type = Unknown;
};
template <typename Base>
struct SegmentSizes<Base, std::void_t<decltype(&Base::getExpandableSegmentSizes)>> {
  using type = decltype(std::declval<Base&>().getExpandableSegmentSizes(0));
};

// Bytes of the arena in place of the memory that it was reserved with. The peak is that of both together.
void count_arena(DeviceStats& stats, const DeviceBytes& peak) {
  const ArenaCounters arena = the_arena()->counters();
  const auto count = [&](auto& stat, int64_t live, int64_t most) {
    stat.current += live - arena.reserved_bytes;
    stat.peak = std::max(most, stat.current);
  };
  for (const size_t type : {AGGREGATE, LARGE_POOL}) {
    count(stats.requested_bytes[type], arena.live_bytes, peak.requested);
    count(stats.allocated_bytes[type], arena.live_size, peak.allocated);
    count(stats.active_bytes[type], arena.live_size, peak.allocated);
  }
}

char* reserved_with(const void* block) {
  const Arena* const owner = arena_of(block);
  return owner != nullptr ? owner->reserved_with(block) : nullptr;
}

// A template, so that members that the base does not know are looked at only if they are called.
template <typename Base>
class InFront final : public Base {
 public:
  InFront(Base* native, int device) : native_(native), device_(device) {}

  Base* native() const {
    return native_;
  }

  // -- what the arena changes --

  c10::DataPtr allocate(size_t nbytes) override {
    return watched(nbytes, [] { return c10::cuda::getCurrentCUDAStream().stream(); }, [&] { return serve(nbytes); });
  }

  void raw_delete(void* block) override {
    Arena* const owner = arena_of(block);
    if (owner == nullptr || !owner->give_back(block)) {
      native_->raw_delete(block);
    }
  }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get() == nullptr || block.get_deleter() != &give_back_served || stream.device_index() != device_ ||
        !arena_of(block.get())->use_on(block.get(), stream.stream())) {
      native_->recordStream(block, stream);
    }
  }

  void* getBaseAllocation(void* block, size_t* nbytes) override {
    char* const reserved = reserved_with(block);
    return native_->getBaseAllocation(reserved != nullptr ? reserved : block, nbytes);
  }

  caching::ShareableHandle shareIpcHandle(void* block) override {
    char* const reserved = reserved_with(block);
    if (reserved == nullptr) {
      return native_->shareIpcHandle(block);
    }
    caching::ShareableHandle shared = native_->shareIpcHandle(reserved);
    shared.offset += static_cast<char*>(block) - reserved;
    return shared;
  }

  // Captured graphs and pools of the user's have memory of their own.
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::function<bool(cudaStream_t)> filter)
      override {
    native_->beginAllocateToPool(device, pool, std::move(filter));
    pools_ += device == device_;
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_->endAllocateToPool(device, pool);
    if (device == device_ && pools_ > 0) { // one may have begun before
      --pools_;
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    DeviceStats stats = native_->getDeviceStats(device);
    if (device == device_ && the_arena() != nullptr) {
      count_arena(stats, device_peak());
    }
    return stats;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    native_->resetPeakStats(device);
    if (device == device_) {
      reset_device_peak();
    }
  }

  // -- what is handed on --

  void* raw_alloc(size_t nbytes) override {
    return with_relief(nbytes, [&] { return native_->raw_alloc(nbytes); }); // never the arena's: a native `raw_delete` may end it
  }
  void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override {
    return with_relief(nbytes, [&] { return native_->raw_alloc_with_stream(nbytes, stream); });
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return native_->raw_deleter(); // what graphs know their blocks by
  }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override {
    return native_->is_simple_data_ptr(block);
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    native_->copy_data(destination, source, nbytes);
  }
  void init(int count) override {
    native_->init(count);
  }
  bool initialized() override {
    return native_->initialized();
  }
  std::string name() override {
    return native_->name();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    native_->resetAccumulatedStats(device);
  }
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override {
    native_->cacheInfo(device, largest);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    native_->setMemoryFraction(fraction, device);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_->releasePool(device, pool);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_->getIpcDevPtr(std::move(handle));
  }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
    native_->enablePeerAccess(device, peer);
  }
  cudaError_t memcpyAsync(
      void* to, int to_device, const void* from, int from_device, size_t nbytes, cudaStream_t stream, bool peer)
      override {
    return native_->memcpyAsync(to, to_device, from, from_device, nbytes, stream, peer);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return native_->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }

  // -- what only some versions have, or have with other arguments --

  void emptyCache(c10::MempoolId_t pool) {
    HAND_ON(emptyCache, pool);
  }
  void emptyCache() {
    HAND_ON(emptyCache);
  }
  double getMemoryFraction(c10::DeviceIndex device) {
    return HAND_ON(getMemoryFraction, device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    return HAND_ON(getMemoryInfo, device);
  }
  typename SegmentSizes<Base>::type getExpandableSegmentSizes(c10::DeviceIndex device) {
    return HAND_ON(getExpandableSegmentSizes, device);
  }
  void enable(bool on) {
    HAND_ON(enable, on);
  }
  bool isEnabled() const {
    return HAND_ON(isEnabled);
  }
  caching::SnapshotInfo snapshot() {
    return HAND_ON(snapshot);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool) {
    return HAND_ON(snapshot, pool);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool, bool traces) {
    return HAND_ON(snapshot, pool, traces);
  }
  void markCaptureBegin(c10::DeviceIndex device) {
    HAND_ON(markCaptureBegin, device);
  }
  void markCaptureEnd(c10::DeviceIndex device) {
    HAND_ON(markCaptureEnd, device);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
    return HAND_ON(getPoolUseCount, device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, std::shared_ptr<Base> of) {
    HAND_ON(createOrIncrefPool, device, pool, std::move(of));
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool, Base* of) {
    HAND_ON(createOrIncrefPool, device, pool, of);
  }
  void ensureExistsAndIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
    HAND_ON(ensureExistsAndIncrefPool, device, pool);
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool on) {
    HAND_ON(setUseOnOOM, device, pool, on);
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool) {
    HAND_ON(setUseOnOOM, device, pool);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
    HAND_ON(setNoSplit, device, pool);
  }
  bool checkPoolLiveAllocations(
      c10::DeviceIndex device, c10::MempoolId_t pool, const std::unordered_set<void*>& expected) {
    return HAND_ON(checkPoolLiveAllocations, device, pool, expected);
  }
  bool isHistoryEnabled() {
    return HAND_ON(isHistoryEnabled);
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) {
    return HAND_ON(getContextForPointer, block);
  }
  void recordHistory(
      bool on, caching::CreateContextFn recorder, size_t most, caching::RecordContext when, bool clear,
      const std::vector<std::string>& skipped) {
    HAND_ON(recordHistory, on, recorder, most, when, clear, skipped);
  }
  void recordHistory(
      bool on, caching::CreateContextFn recorder, size_t most, caching::RecordContext when, bool clear) {
    HAND_ON(recordHistory, on, recorder, most, when, clear);
  }
  void recordHistory(bool on, caching::CreateContextFn recorder, size_t most, caching::RecordContext when) {
    HAND_ON(recordHistory, on, recorder, most, when);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) {
    HAND_ON(recordAnnotation, annotation);
  }
  void pushCompileContext(std::string& context) {
    HAND_ON(pushCompileContext, context);
  }
  void popCompileContext() {
    HAND_ON(popCompileContext);
  }
  void setUserMetadata(const std::string& metadata) {
    HAND_ON(setUserMetadata, metadata);
  }
  std::string getUserMetadata() {
    return HAND_ON(getUserMetadata);
  }
  void attachOomRejectionObserver(typename RejectionObserver<Base>::type observer) {
    HAND_ON(attachOomRejectionObserver, std::move(observer));
  }
  c10::DataPtr allocateWithAddress(size_t nbytes, void* address) {
    return HAND_ON(allocateWithAddress, nbytes, address);
  }

 private:
  c10::DataPtr serve(size_t nbytes) {
    if (serving() && pools_.load(std::memory_order_relaxed) == 0) {
      c10::DeviceIndex current = -1;
      C10_CUDA_CHECK(c10::cuda::GetDevice(&current));
      if (current == device_) {
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(current).stream();
        if (void* block = serve_request(nbytes, stream)) {
          return {block, block, &give_back_served, c10::Device(c10::DeviceType::CUDA, current)};
        }
      }
    }
    return with_relief(nbytes, [&] { return native_->allocate(nbytes); });
  }

  Base* const native_;
  const int device_;
  std::atomic<int> pools_{0};
};

template <typename Base>
Base* in_front(Base* native, int device) {
  if constexpr (std::is_abstract_v<InFront<Base>>) {
    throw std::runtime_error("this version of torch has an allocator that memplug does not know all calls of");
  } else {
    return new InFront<Base>(native, device); // never destroyed: torch may have kept a pointer to it
  }
}

Native* native_allocator = nullptr;
Native* standing = nullptr;
int standing_device = 0, used_by = 0; // a bit for each `User`
std::atomic<int> reserved_parts{0};
std::atomic<bool> leaves{false}; // once nothing is reserved

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
  if (on && !was_on && !leaves) { // what was reset meanwhile was reset there alone
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
    (void)swap(standing, native_allocator); // an allocator that was put in front of this one since then stays there
  }
}

} // namespace memplug

#endif
