// Offloads tensors after a request for memory has failed, see relief.h.
#include <algorithm>
#include <tuple>
#include <utility>

#include "relief.h"
#include "swap_step.h"

namespace memplug {
namespace {

constexpr int64_t kSoon = 8; // a tensor that the last 8 outermost operators used is likely to be used again soon

} // namespace

bool SwapStep::relieve(int64_t nbytes, int failures) {
  if (!is_running_) {
    return false;
  }
  // memplug has not seen the first step from its beginning, so a failure there says nothing about later steps
  counters.steps > 0 ? repeated_.distrust() : repeated_.spoil();
  if (failures == 1) {
    const int64_t released = swapper_->release_leaving();
    if (released > 0) {
      note_relief({ReliefEvent::RELEASED, released});
      return true;
    }
  }
  std::vector<Idle> all = idle();
  // Tensors that were not used lately come first. Among them, the smallest that is large enough comes first; if none is
  // large enough, the largest does. Among tensors of one size, the least recently used comes first: backward needs it
  // last.
  const auto rank = [&](const Idle& each) {
    const bool soon = each.last_use + kSoon >= moments_, small = each.nbytes < nbytes;
    return std::tuple(soon, small, small ? -each.nbytes : each.nbytes, each.last_use);
  };
  std::sort(all.begin(), all.end(), [&](const Idle& one, const Idle& other) { return rank(one) < rank(other); });
  int64_t freed = 0;
  for (const Idle& each : all) {
    if (freed >= nbytes) {
      break;
    }
    const int64_t left = swapper_->leave_now(each.storage);
    if (left > 0) {
      note_relief({ReliefEvent::LEFT, left});
    }
    freed += left;
  }
  while (freed < nbytes) {
    const int64_t turned = swapper_->turn_back();
    if (turned == 0) {
      break;
    }
    note_relief({ReliefEvent::TURNED, turned});
    freed += turned;
  }
  return freed > 0;
}

// Returns tensors that no running operator of any thread uses, in the order in which they were first seen.
std::vector<SwapStep::Idle> SwapStep::idle() const {
  const OperatorMoment now{running_.empty() ? moments_ + 1 : running_.front(), swapper_->current_stream()};
  std::vector<Idle> all;
  for (const auto& weak : alive_) {
    if (auto storage = weak.lock()) {
      const auto [nbytes, last_use] = finder_.idle(storage.get(), now);
      if (nbytes > 0) {
        all.push_back({c10::Storage(std::move(storage)), nbytes, last_use});
      }
    }
  }
  return all;
}

} // namespace memplug
