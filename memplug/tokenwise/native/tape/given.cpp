// Given memory (forward.h): notes which tensors in it a forward reads, and checks that nothing wrote to them after the
// forward.
#include <algorithm>

#include "forward.h"
#include "layouts.h"
#include "replay.h"
#include "transfer.h"

namespace memplug {
namespace {

template <typename Counts>
bool has(const Counts& counts, const at::Tensor& tensor) {
  return std::any_of(counts.begin(), counts.end(), [&](const Count& each) { return each.is_of(tensor); });
}

} // namespace

void Forward::count(GivenMemory& memory, const at::Tensor& tensor, size_t met) {
  if (!has(memory.counts, tensor)) {
    memory.counts.emplace_back(tensor, met, false);
  }
}

void Forward::read(const at::Tensor& tensor, size_t met, bool in_unit) {
  const int32_t storage = is_plain(tensor) || is_irregular(tensor) ? storages.find(tensor) : -1;
  if (storage >= 0) {
    if (GivenMemory& memory = given[storage]; memory.tensor.defined()) {
      count(memory, tensor, met);
    }
  } else if (!has(read_, tensor)) {
    read_.emplace_back(tensor, met, in_unit);
  }
}

void Forward::read(const Forward& inner) {
  const auto add = [&](const Count& each) {
    read_.push_back(each);
    read_.back().met = begun_;
    read_.back().in_unit = false;
  };
  for (size_t storage = 0; storage < inner.given.size(); ++storage) {
    if (!inner.own_[storage]) {
      std::for_each(inner.given[storage].counts.begin(), inner.given[storage].counts.end(), add);
    }
  }
  std::for_each(inner.read_.begin(), inner.read_.end(), add);
}

void Forward::close_counts() {
  for (GivenMemory& memory : given) {
    for (Count& each : memory.counts) {
      each.close();
    }
  }
  // returns whether later writes to the memory need no check. There are two cases: the forward wrote to it, so a
  // recompute pass puts its value back; or the forward does not hold it, so the pass makes or prefetches it.
  const auto is_put_back = [&](const Count& each) {
    const auto tensor = each.first.lock();
    const bool lies = tensor.defined() && (is_plain(at::Tensor(tensor)) || is_irregular(at::Tensor(tensor)));
    const int32_t storage = lies ? storages.find(at::Tensor(tensor)) : -1;
    return storage >= 0 && (own_[storage] || !given[storage].tensor.defined());
  };
  read_.erase(std::remove_if(read_.begin(), read_.end(), is_put_back), read_.end());
  for (Count& each : read_) {
    each.close();
  }
}

void Forward::check_read(size_t end) const {
  for (const Count& each : read_) {
    if (!each.in_unit && each.met <= end && each.has_changed()) {
      each.fail();
    }
  }
}

void Forward::note_stale() {
  for (size_t i = 0; i < saved.size(); ++i) {
    saved[i].stale = changed(i) != nullptr;
  }
}

const Count* Forward::changed(size_t index) const {
  const size_t end = tape().saves[index].after;
  const auto found_in = [&](const auto& counts) -> const Count* {
    const auto found = std::find_if(
        counts.begin(), counts.end(), [&](const Count& each) { return each.met <= end && each.has_changed(); });
    return found != counts.end() ? &*found : nullptr;
  };
  for (size_t storage = 0; storage < given.size(); ++storage) {
    if (const Count* const found = own_[storage] ? nullptr : found_in(given[storage].counts)) {
      return found;
    }
  }
  return found_in(read_);
}

at::Tensor Forward::given_again(int32_t storage, bool regathered, bool changes, size_t end) const {
  const GivenMemory& memory = given[storage];
  if (!memory.tensor.defined()) {
    throw Diverged("a tensor from outside of the region is missing in the recompute pass");
  }
  for (const Count& each : memory.counts) {
    if (!changes && each.met <= end && each.has_changed()) {
      each.fail();
    }
  }
  if (is_irregular(memory.tensor)) {
    return memory.tensor;
  }
  const size_t nbytes = regathered ? memory.tensor.nbytes() : memory.tensor.storage().nbytes();
  if (static_cast<int64_t>(nbytes) < storages.nbytes[storage]) {
    throw Failure(Failure::GIVEN_WAS_TAKEN, memory.tensor.sizes());
  }
  return memory.tensor;
}

} // namespace memplug
