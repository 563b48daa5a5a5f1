#include "flow.h"

#include "blocks.h"
#include "frame.h"
#include "layouts.h"
#include "versions.h"

namespace memplug {
namespace {

thread_local std::weak_ptr<Frame> newest;

} // namespace

bool Flow::is_worth_swapping(const at::Tensor& tensor) const {
  return tensor.device().type() == device.type() && is_plain(tensor) &&
      is_large(static_cast<int64_t>(tensor.nbytes())) && is_dense(tensor);
}

std::shared_ptr<Swapped> Flow::swap_input(const at::Tensor& value, bool later) {
  for (const auto& each : resident_) {
    const auto frame = each.lock();
    if (frame == nullptr) {
      continue;
    }
    for (const auto& [storage, input] : frame->inputs) {
      if (input->ready != Ready::ASSUMED && input->tensor.defined() && input->resident && input->version == version_of(value) &&
          input->geometry.is_of(value) && input->tensor.is_alias_of(value)) {
        return input;
      }
    }
  }
  return transfer->offload(value, value.size(0), later, /*unread=*/true);
}

void Flow::before_write(const Frame& by, const at::Tensor& tensor) {
  for (Frame* const frame : live) {
    if (frame != &by) {
      frame->before_write_elsewhere(tensor);
    }
  }
}

void Flow::make_room() {
  while (resident_.size() >= buffers_) {
    release_oldest();
  }
}

void Flow::begin(const std::shared_ptr<Frame>& frame) {
  if (const auto previous = newest.lock(); previous != nullptr && previous->flow == frame->flow) {
    frame->previous = previous;
  }
  newest = frame;
  resident_.push_back(frame);
}

void Flow::begin_micro_batch() {
  newest.reset();
}

std::vector<std::shared_ptr<const Tape>> Flow::known(const Region& region) const {
  std::vector<std::shared_ptr<const Tape>> found;
  if (region.last != nullptr) {
    found.push_back(region.last);
  }
  if (const auto kept = tapes_.find(region.kind); kept != tapes_.end()) {
    std::copy_if(kept->second.begin(), kept->second.end(), std::back_inserter(found), [&](const auto& tape) {
      return tape != region.last;
    });
  }
  return found;
}

void Flow::keep(Region& region, const std::shared_ptr<const Tape>& tape) {
  region.last = tape;
  auto& kept = tapes_[region.kind];
  if (!kept.empty() && kept.front() == tape) {
    return;
  }
  kept.erase(std::remove(kept.begin(), kept.end(), tape), kept.end());
  kept.insert(kept.begin(), tape);
  kept.resize(std::min(kept.size(), kTapes));
}

void Flow::end(Frame& frame) {
  input_bytes += frame.input_bytes;
  peak_input_bytes = std::max(peak_input_bytes, input_bytes);
  largest_region_bytes = std::max(largest_region_bytes, frame.forward.saved_bytes);
  largest_saved_bytes = std::max(largest_saved_bytes, frame.forward.largest_saved_bytes);
  number(frame);
  frame.region->sending_bytes = transfer->copies.offloaded_bytes - frame.sent_before_bytes;
  for (const auto& part : frame.swapped) {
    if (part->is_away() && part->uses > 0) { // `Transfer::before_write` has released the tensor already
      frame.todo.push_back(part);
      ++ledger->waiting;
    }
  }
  if (!frame.region->offloads_late) {
    expect(*frame.region);
    return;
  }
  release_others(frame); // code after the last region, such as a loss, may take more memory than any region
}

// Gives the next number to a frame whose forward has ended, and to its swapped tensors. A tensor that several frames
// share gets the number of the last of them, whose backward asks for it first.
void Flow::number(const Frame& frame) {
  int64_t nbytes = 0;
  for (const auto& part : frame.swapped) {
    part->frame = over_;
    nbytes += part->uses > 0 ? in_blocks(part->nbytes) : 0;
  }
  ++over_;
  largest_frame_bytes = std::max(largest_frame_bytes, nbytes);
}

void Flow::expect(const Region& region) {
  expected_bytes += region.forward_bytes.value_or(0);
  unplanned += region.forward_bytes.has_value() ? 0 : 1;
}

void Flow::pump(Frame& frame, int64_t largest_bytes) {
  note_held(frame);
  if (ledger->waiting == 0) {
    return;
  }
  int64_t pending_bytes = 0;
  for (auto ahead = frame.shared_from_this(); ahead != nullptr; ahead = ahead->previous.lock()) {
    while (!ahead->todo.empty()) {
      const auto part = ahead->todo.back();
      const bool is_ahead = ahead.get() != &frame && !part->tensor.defined();
      if (is_ahead && !has_room(*part, pending_bytes, largest_bytes)) {
        note_held(frame);
        return;
      }
      // remove the tensor before the copy: a device implemented in Python may let another thread run meanwhile
      ahead->todo.pop_back();
      --ledger->waiting;
      transfer->prefetch(*part);
    }
    pending_bytes += ahead->pending_bytes();
    // tensors prefetched for still earlier frames stay on the device during all of this frame's backward
    if (ahead.get() != &frame) {
      largest_bytes = largest_saved_bytes;
    }
  }
  note_held(frame);
}

// Returns whether a tensor may be prefetched before its frame's backward begins. `pending_bytes`: bytes that must stay
// free for recompute passes. `largest_bytes`: size of the largest saved tensor that the running backward has yet to
// read. A tensor larger than that may use the limit for `largest_bytes`, which is higher than the usual limit, the one
// for `largest_saved_bytes`. Under the usual limit such a tensor would be prefetched last, since the release of smaller
// tensors makes no room for it.
bool Flow::has_room(const Swapped& part, int64_t pending_bytes, int64_t largest_bytes) {
  if (const auto* const buffers = transfer->buffers_of(part)) {
    return buffers->has_room(part.frame, part.nbytes);
  }
  const int64_t limit = limit_bytes(part.nbytes > largest_bytes ? largest_bytes : largest_saved_bytes);
  return held_bytes() + pending_bytes + part.nbytes <= limit;
}

void Flow::trim(const Frame& frame) {
  const auto of_frame = [&] { return frame.pending_bytes() + frame.forward.kept_bytes; };
  while (largest_region_bytes > 0 && resident_.size() > 1) {
    const int64_t excess = held_bytes() + of_frame() - limit_bytes(largest_saved_bytes);
    if (excess <= 0) {
      break;
    }
    const auto oldest = resident_.front().lock();
    if (oldest == nullptr || !oldest->is_over() || !oldest->release_first(excess)) {
      release_oldest();
    }
  }
  note_held(frame);
}

void Flow::note_held(const Frame& frame) {
  peak_held_bytes = std::max(peak_held_bytes, held_bytes() + frame.pending_bytes());
}

// Releases all frames whose forwards have ended, except `frame`.
void Flow::release_others(const Frame& frame) {
  std::vector<std::shared_ptr<Frame>> others;
  for (const auto& each : resident_) {
    if (const auto other = each.lock(); other != nullptr && other.get() != &frame && other->is_over()) {
      others.push_back(other);
    }
  }
  resident_.erase(
      std::remove_if(
          resident_.begin(),
          resident_.end(),
          [&](const auto& each) {
            return each.expired() || std::find(others.begin(), others.end(), each.lock()) != others.end();
          }),
      resident_.end());
  for (const auto& other : others) {
    other->release();
  }
}

void Flow::release_oldest() {
  const auto oldest = resident_.front().lock();
  resident_.pop_front();
  if (oldest != nullptr) {
    oldest->release();
  }
}

} // namespace memplug
