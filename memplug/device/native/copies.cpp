#include "copies.h"

#include <utility>

namespace memplug {

Copies::Copies(std::shared_ptr<Streams> streams, std::shared_ptr<RowStore> store)
    : streams_(std::move(streams)),
      store_(std::move(store)),
      offload_stream_(streams_->make()),
      prefetch_stream_(streams_->make()) {}

std::optional<Slot> Copies::take(int64_t nbytes) {
  auto slot = store_->take(nbytes);
  if (!slot) {
    ++refused;
    refused_bytes += nbytes;
  }
  return slot;
}

EventRef Copies::offload(const at::Tensor& rows, const Slot& slot, const StreamRef& owner) {
  // not a range loop: streams implemented in Python let other threads run, which may add a user
  for (size_t i = 0; i < users_.size(); ++i) {
    const StreamRef user = users_[i];
    streams_->wait(offload_stream_, streams_->record(user), Wait::OFFLOAD_FOR_COMPUTE);
  }
  copy(owner, [&] { store_->copy_out(*streams_, offload_stream_, slot, rows); });
  offloaded_bytes += slot.nbytes;
  return streams_->record(offload_stream_);
}

EventRef Copies::prefetch(const at::Tensor& rows, const Slot& slot, const StreamRef& owner) {
  prefetch_after(owner);
  copy(owner, [&] { store_->copy_in(*streams_, prefetch_stream_, rows, slot); });
  prefetched_bytes += slot.nbytes;
  return streams_->record(prefetch_stream_);
}

void Copies::prefetch_after(const StreamRef& stream) {
  streams_->wait(prefetch_stream_, streams_->record(stream), Wait::PREFETCH_FOR_COMPUTE);
}

void Copies::wait_on_its_streams(const StreamRef& owner, const EventRef& event, Wait why) {
  wait(owner, event, why);
  if (const StreamRef current = streams_->current(); !streams_->same(current, owner)) {
    wait(current, event, why);
  }
}

void Copies::drain() {
  while (!abandoned_.empty()) {
    const Abandoned next = std::move(abandoned_.front());
    abandoned_.pop_front();
    if (next.prefetched != nullptr) {
      wait(next.owner, next.prefetched, Wait::DISCARD_FOR_PREFETCH);
    }
    if (next.offloaded != nullptr) {
      wait(next.owner, next.offloaded, Wait::RELEASE_FOR_OFFLOAD);
    }
    next.free();
    if (!closed_ && next.slot) {
      store_->give(*next.slot);
    }
  }
}

} // namespace memplug
