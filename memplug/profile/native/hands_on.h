// A CUDA allocator that hands every call on to another one, here called the native allocator.
//
// Versions of torch differ in the allocator's calls. A call that some versions lack is declared here without
// `override`, and handed on if the installed version has it. If the installed version has a pure virtual call that is
// missing here, the class stays abstract. memplug/native/cuda_calls.py finds calls that are missing here and not pure
// virtual.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace memplug {

// Hands the call `NAME(...)` on to the native allocator; throws if the allocator does not have it.
#define HAND_ON(NAME, ...)                                                                   \
  [&](auto* native) {                                                                        \
    if constexpr (requires { native->NAME(__VA_ARGS__); }) {                                 \
      return native->NAME(__VA_ARGS__);                                                      \
    } else {                                                                                 \
      throw std::logic_error("this version of torch has no " #NAME " with these arguments"); \
    }                                                                                        \
  }(this->native_)

namespace caching = c10::cuda::CUDACachingAllocator;

// The types of `attachOomRejectionObserver`'s first argument and of `getExpandableSegmentSizes`'s result. If the base
// class lacks the member, its type is `Unknown`.
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

// A template, so that the compiler skips members that override nothing in the base class and are never called.
template <typename Base>
class HandsOn : public Base {
 public:
  explicit HandsOn(Base* native) : native_(native) {}

  c10::DeleterFnPtr raw_deleter() const override {
    return native_->raw_deleter(); // CUDA graphs recognise their blocks by this deleter
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

  // -- calls that only some versions have, or have with other arguments --

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
  bool supportsUserMetadata() {
    return HAND_ON(supportsUserMetadata);
  }
  void annotateMemory(const void* block, const std::string& metadata) {
    HAND_ON(annotateMemory, block, metadata);
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

 protected:
  Base* const native_;
};

#undef HAND_ON

} // namespace memplug
