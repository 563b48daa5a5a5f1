#include "flow.h"

#include "frame.h"

namespace memplug {

bool Flow::is_worth_swapping(const at::Tensor& tensor) const {
  return tensor.device().type() == device_ && tensor.has_storage() &&
      !tensor.key_set().has(c10::DispatchKey::Python) &&
      static_cast<int64_t>(tensor.nbytes()) >= min_offload_bytes_ && is_dense(tensor);
}

std::shared_ptr<Swapped> Flow::swap_input(const at::Tensor& value, bool later) {
  for (const auto& each : resident_) {
    const auto frame = each.lock();
    if (frame == nullptr) {
      continue;
    }
    for (const auto& [storage, input] : frame->inputs) {
      if (input->tensor.defined() && input->resident && input->version == value._version() &&
          input->geometry.is_of(value) && input->tensor.is_alias_of(value)) {
        return input;
      }
    }
  }
  return transfer->offload(value, value.size(0), later);
}

void Flow::make_room() {
  while (resident_.size() >= kResident) {
    release_oldest();
  }
}

void Flow::end(const Frame& frame) {
  input_bytes += frame.input_bytes;
  peak_input_bytes = std::max(peak_input_bytes, input_bytes);
  largest_region_bytes = std::max(largest_region_bytes, frame.forward.saved_bytes);
  largest_saved_bytes = std::max(largest_saved_bytes, frame.forward.largest_saved_bytes);
  if (!frame.region->lingers) {
    expect(*frame.region);
  }
}

void Flow::expect(const Region& region) {
  expected_bytes += region.forward_bytes.value_or(0);
  unplanned += region.forward_bytes.has_value() ? 0 : 1;
}

void Flow::pump(Frame& frame) {
  if (ledger->waiting == 0) {
    return;
  }
  int64_t pending_bytes = 0;
  for (auto ahead = frame.shared_from_this(); ahead != nullptr; ahead = ahead->previous.lock()) {
    while (!ahead->todo.empty()) {
      const auto part = ahead->todo.back();
      const bool is_ahead = ahead.get() != &frame && !part->tensor.defined();
      if (is_ahead && held_bytes() + pending_bytes + part->nbytes > limit_bytes()) {
        return;
      }
      ahead->todo.pop_back(); // before the copy, for which a device in Python may let another thread run
      --ledger->waiting;
      transfer->prefetch(*part);
    }
    pending_bytes += ahead->pending_bytes();
  }
}

void Flow::trim(const Frame& frame) {
  while (largest_region_bytes > 0 && resident_.size() > 1 && held_bytes() + frame.pending_bytes() > limit_bytes()) {
    release_oldest();
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
