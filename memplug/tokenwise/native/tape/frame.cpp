#include "frame.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <iterator>

#include "clock.h"
#include "layouts.h"

namespace memplug {

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Geometry bytes{{static_cast<int64_t>(tensor.storage().nbytes())}, {1}, 0, at::kByte, false, false};
  return alias_at(alias_at(tensor, bytes).clone(), Geometry::of(tensor));
}

void KeptTensor::before_write() {
  tensor = copy_of(tensor);
  version = version_of(tensor);
  written = true;
}

const at::Tensor& KeptTensor::get() const {
  if (version_of(tensor) != version) {
    throw Failure(Failure::KEPT_WAS_WRITTEN, tensor.sizes());
  }
  return tensor;
}

at::Tensor KeptTensor::fresh() const {
  return written ? copy_of(get()) : alias_of(get());
}

Held::Held(const at::Tensor& value, bool itself)
    : tensor(itself ? value : value.detach()),
      version(version_of(value)),
      requires_grad(value.requires_grad()) {}

void Held::before_write() {
  tensor = copy_of(tensor.detach());
  version = version_of(tensor);
  written = true;
}

const at::Tensor& Held::get() const {
  check_version(tensor, version, "input of a region");
  return tensor;
}

at::Tensor Held::fresh() const {
  return copy_of(get());
}

Frame::Frame(
    std::vector<std::shared_ptr<const Tape>> known,
    std::shared_ptr<Flow> own_flow,
    std::shared_ptr<Region> own_region,
    Storages::Regathered regathered)
    : flow(std::move(own_flow)),
      region(std::move(own_region)),
      setting(region->setting),
      forward(std::move(known), this, regathered, flow->ledger),
      sent_before_bytes(flow->transfer->copies.offloaded_bytes),
      streams_{flow->transfer->streams().current()},
      newest_stream_(flow->transfer->streams().current_number()) {
  ++flow->forwards;
  flow->live.insert(this);
  region->peak = std::max(region->peak, ++region->live);
}

Frame::~Frame() {
  flow->live.erase(this);
  --region->live;
  flow->ledger->waiting -= static_cast<int64_t>(todo.size());
  flow->input_bytes -= is_over_ ? input_bytes : 0;
}

// -- forward ----------------------------------------------------------------------------------------------------------

std::shared_ptr<Swapped> Frame::enter(const at::Tensor& value, bool swaps) {
  // an earlier input in the same storage was swapped, and with it all of the storage
  if (auto part = is_plain(value) ? input_of(forward.storages.find(value)) : nullptr) {
    return part;
  }
  std::shared_ptr<Swapped> part;
  if (swaps && flow->is_worth_swapping(value)) {
    part = flow->swap_input(value, region->offloads_late);
    if (part == nullptr || part->uses == 0) {
      ++offered;
      offered_bytes += static_cast<int64_t>(value.storage().nbytes());
      input_bytes += part != nullptr ? part->nbytes : 0;
    }
  }
  const int32_t storage = forward.enter(value, part != nullptr);
  if (part != nullptr) {
    Streams& streams = flow->transfer->streams();
    // record the use with the allocator: another stream may own the tensor, and memplug frees the tensor sooner than
    // plain torch would
    streams.use_on(streams.current(), value);
    swapped.push_back(part);
    inputs.emplace_back(storage, part);
    if (part->ready == Ready::UNREAD) {
      unread_.push_back(part);
    }
    parts_[storage] = {part, nullptr};
    forward.set_captured(storage, part->whole(), false, value.scalar_type());
  }
  return part;
}

void Frame::note_stream() {
  Streams& streams = flow->transfer->streams();
  if (const int64_t number = streams.current_number(); number != newest_stream_) {
    newest_stream_ = number;
    const StreamRef current = streams.current();
    const bool known = std::any_of(
        streams_.begin(), streams_.end(), [&](const StreamRef& each) { return streams.same(each, current); });
    if (!known) {
      streams_.push_back(current);
    }
  }
}

// Records the use with the allocator if the forward has several streams. Without memplug, autograd would keep a saved
// tensor while another stream may read it; memplug frees it sooner.
void Frame::note_use(const at::Tensor& tensor) {
  if (streams_.size() > 1) {
    Streams& streams = flow->transfer->streams();
    streams.use_on(streams.current(), tensor);
  }
}

void Frame::note_reads(const Record& record) {
  const Suspension own;
  for (const Use& use : record.inputs) {
    const auto found = parts_.find(use.storage);
    if (found != parts_.end() && found->second.swapped != nullptr) {
      flow->transfer->note_read(*found->second.swapped);
    }
  }
  forget_read();
}

void Frame::forget_read() {
  const auto is_read = [](const auto& input) { return input->ready != Ready::UNREAD; };
  unread_.erase(std::remove_if(unread_.begin(), unread_.end(), is_read), unread_.end());
}

// Leaves on the device the inputs that no operator has read: code after this region may be the first to wait for the
// stream that makes such an input. In an opaque region all inputs count as read.
void Frame::close_unread() {
  forget_read();
  for (const auto& input : unread_) {
    if (is_opaque) {
      flow->transfer->note_read(*input, Ready::ASSUMED);
    } else if (input->uses == 0) {
      --offered;
      offered_bytes -= input->nbytes;
      input_bytes -= input->nbytes;
    }
  }
  unread_.clear();
}

std::shared_ptr<Swapped> Frame::input_of(int32_t storage) const {
  const auto found =
      std::find_if(inputs.rbegin(), inputs.rend(), [&](const auto& input) { return input.first == storage; });
  return found != inputs.rend() ? found->second : nullptr;
}

void Frame::before_write(int32_t storage, const at::Tensor& tensor) {
  const Suspension own;
  if (forward.storages.given[storage]) {
    flow->before_write(*this, tensor);
  }
  const auto found = parts_.find(storage);
  if (found == parts_.end()) {
    before_foreign_write(storage, tensor);
    return;
  }
  const CapturedTensor part = found->second;
  parts_.erase(found);
  if (part.kept != nullptr) {
    part.kept->before_write();
    return;
  }
  flow->transfer->before_write(*part.swapped);
  writes_input = writes_input || input_of(storage) != nullptr;
}

void Frame::before_write_elsewhere(const at::Tensor& tensor) {
  for (auto& [storage, part] : parts_) {
    if (part.kept != nullptr && part.kept->tensor.is_alias_of(tensor)) {
      part.kept->before_write();
    } else if (part.swapped != nullptr && part.swapped->tensor.defined() && part.swapped->tensor.is_alias_of(tensor)) {
      flow->transfer->before_write(*part.swapped);
    }
  }
}

void Frame::close(bool direct) {
  is_opaque = region->opaque || forward.opaque() != 0;
  close_unread();
  const bool again = !is_unrepeatable && !forward.communicates() && (forward.opaque() & CHANGED) == 0;
  keeps = is_opaque && forward.holds && !again;
  if (!keeps) {
    forward.let_go();
  }
  forward.sort(direct);
  for (const Forward::Saved& saved : forward.saved) {
    if (saved.alive && saved.way == Forward::Way::VIEW) {
      const CapturedTensor& part = parts_.at(saved.use.storage);
      part.kept != nullptr ? void(part.kept->viewed = true) : void(++part.swapped->uses);
    }
    recomputes = recomputes || (saved.alive && saved.way == Forward::Way::RECOMPUTED);
  }
  if (is_opaque) {
    for (const auto& [storage, input] : inputs) {
      input->uses += recomputes && !keeps ? 1 : 0;
    }
  } else {
    const auto asked = decide();
    for (const int32_t storage : decisions->reads) {
      if (const auto input = recomputes ? input_of(storage) : nullptr) {
        ++input->uses;
      }
    }
    learn(asked);
  }
  // this region's backward does not read an input without uses, so other regions release it
  for (const auto& [storage, input] : inputs) {
    if (input->uses == 0) {
      swapped.erase(std::remove(swapped.begin(), swapped.end(), input), swapped.end());
    }
  }
  for (const auto& part : swapped) {
    part->uses_left = part->uses;
  }
  is_over_ = true;
  flow->end(*this);
  flow->trim(*this);
}

std::vector<size_t> Frame::recomputed() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < forward.saved.size(); ++i) {
    if (forward.saved[i].alive && forward.saved[i].way == Forward::Way::RECOMPUTED) {
      found.push_back(i);
    }
  }
  return found;
}

std::vector<int32_t> Frame::storages_of(const std::vector<size_t>& indices) const {
  std::vector<int32_t> storages;
  for (const size_t index : indices) {
    storages.push_back(forward.saved[index].use.storage);
  }
  return storages;
}

const std::vector<size_t>& Frame::decide(
    const std::vector<CapturedOperator>& captured,
    const std::vector<size_t>& launches) {
  const auto wanted = storages_of(recomputed());
  if (region->decisions == nullptr || !region->decisions->are_of(tape, captured, launches, wanted)) {
    region->decisions = std::make_shared<PassActions>(tape, captured, launches, wanted);
  }
  decisions = region->decisions;
  communicates = decisions->communicates;
  return decisions->substituted;
}

std::vector<size_t> Frame::decide() {
  std::vector<size_t> asked = decide(captured(), launches());
  const auto absent = [&](size_t index) { return captures_.at(index).parts.empty(); };
  while (std::any_of(asked.begin(), asked.end(), absent)) {
    // this forward differs from earlier ones: it needs collectives whose results it did not capture, so let these run
    // again
    for (const size_t index : asked) {
      if (absent(index)) {
        captures_.erase(index);
      }
    }
    for (auto each = launches_.begin(); each != launches_.end();) {
      each = captures_.count(each->second) > 0 ? std::next(each) : launches_.erase(each);
    }
    region->change([](Setting& changed) { changed.unneeded.clear(); });
    asked = decide(captured(), launches());
  }
  if (!recomputes) {
    return {};
  }
  for (const size_t index : asked) {
    for (const CapturedTensor& part : captures_.at(index).parts) {
      if (part.swapped != nullptr) {
        ++part.swapped->uses;
      }
    }
  }
  return asked;
}

std::vector<CapturedOperator> Frame::captured() const {
  std::vector<CapturedOperator> found;
  found.reserve(captures_.size());
  for (const auto& [index, capture] : captures_) {
    found.push_back({index, capture.whole});
  }
  return found;
}

std::vector<size_t> Frame::launches() const {
  std::vector<size_t> found;
  for (const auto& [launch, index] : launches_) {
    found.push_back(launch);
  }
  return found;
}

// -- between ----------------------------------------------------------------------------------------------------------

void Frame::release() {
  region->released = true;
  if (region->offloads_late) {
    flow->expect(*region);
  }
  flow->transfer->release(swapped);
  refill();
}

bool Frame::release_first(int64_t nbytes) {
  if (region->offloads_late) {
    return false;
  }
  std::vector<std::shared_ptr<Swapped>> resident;
  std::copy_if(swapped.begin(), swapped.end(), std::back_inserter(resident), [](const auto& part) {
    return part->resident && part->tensor.defined() && part->slot.has_value();
  });
  std::sort(resident.begin(), resident.end(), [](const auto& one, const auto& other) {
    return one->order < other->order;
  });
  size_t count = 0;
  while (count < resident.size() && nbytes > 0) {
    nbytes -= resident[count++]->nbytes;
  }
  if (nbytes > 0 || count == resident.size()) {
    return false;
  }
  resident.resize(count);
  region->released = true;
  flow->transfer->release(std::move(resident));
  refill();
  return true;
}

// Lists in `todo` the tensors that backward has to prefetch; the one needed first is last.
void Frame::refill() {
  flow->ledger->waiting -= static_cast<int64_t>(todo.size());
  todo.clear();
  for (const auto& part : swapped) {
    // a tensor without uses was captured only because other ranks may need theirs
    if (part->is_away() && part->uses > 0) {
      todo.push_back(part);
    }
  }
  flow->ledger->waiting += static_cast<int64_t>(todo.size());
  if (recomputes) {
    std::reverse(todo.begin(), todo.end());
  }
}

} // namespace memplug
