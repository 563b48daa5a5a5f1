#include "pending_uses.h"

#include <algorithm>

#include "arena.h"

namespace memplug {
namespace {

constexpr size_t MANY_PENDING = 64;

} // namespace

PendingUses::~PendingUses() {
  for (const PendingUse& pending : pending_) {
    device_.drop(pending.event);
  }
}

void PendingUses::use_on(char* block, Stream stream) {
  const auto [first, last] = also_used_on_.equal_range(block);
  if (std::none_of(first, last, [&](const auto& used) { return used.second == stream; })) {
    also_used_on_.emplace(block, stream);
  }
}

void PendingUses::end_block(char* begin, char* end, Stream stream, bool alone, bool waits) {
  const auto [first, last] = also_used_on_.equal_range(begin);
  for (auto used = first; used != last; ++used) {
    if (used->second == stream) { // a stream's own work is in order anyway
      continue;
    }
    pending_.push_back({begin, end, used->second, device_.record(used->second)});
    if (waits) {
      device_.wait(stream, pending_.back().event);
    }
  }
  also_used_on_.erase(first, last);
  if (!alone) {
    pending_.push_back({begin, end, stream, device_.record(stream)});
  }
  if (pending_.size() >= MANY_PENDING) {
    forget_done();
  }
}

void PendingUses::add(char* begin, char* end, Stream stream) {
  pending_.push_back({begin, end, stream, device_.record(stream)});
}

void PendingUses::order(char* begin, char* end, Stream stream) {
  for (const PendingUse& pending : pending_) {
    if (pending.begin < end && begin < pending.end && pending.stream != stream) {
      device_.wait(stream, pending.event);
    }
  }
}

void PendingUses::order_after_all(Stream stream) {
  for (const PendingUse& pending : pending_) {
    device_.wait(stream, pending.event);
  }
}

void PendingUses::forget_done() {
  const auto done = std::partition(
      pending_.begin(), pending_.end(), [&](const PendingUse& pending) { return !device_.is_done(pending.event); });
  for (auto pending = done; pending != pending_.end(); ++pending) {
    device_.drop(pending->event);
  }
  pending_.erase(done, pending_.end());
}

} // namespace memplug
