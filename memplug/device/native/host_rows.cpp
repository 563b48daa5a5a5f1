#include "host_rows.h"

#include <algorithm>
#include <iterator>

namespace memplug {

std::optional<Slot> HostRows::take(int64_t nbytes) {
  const int64_t size = (nbytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  if (used_bytes + size > limit_bytes) {
    return std::nullopt;
  }
  auto slot = find(size, nbytes);
  if (!slot && grow_(size)) {
    slot = find(size, nbytes);
  }
  if (slot) {
    used_bytes += size;
    peak_bytes = std::max(peak_bytes, used_bytes);
    recent_peak_bytes = std::max(recent_peak_bytes, used_bytes);
  }
  return slot;
}

std::optional<Slot> HostRows::find(int64_t size, int64_t nbytes) {
  for (size_t i = 0; i < slabs_.size(); ++i) {
    auto& holes = slabs_[i].holes;
    for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
      if (hole->second >= size) {
        const int64_t offset = hole->first, left = hole->second - size;
        hole = holes.erase(hole);
        if (left > 0) {
          holes.emplace_hint(hole, offset + size, left);
        }
        return Slot{i, offset, size, nbytes};
      }
    }
  }
  return std::nullopt;
}

void HostRows::give(const Slot& slot) {
  auto& holes = slabs_.at(slot.slab).holes;
  auto hole = holes.emplace(slot.offset, slot.size).first;
  if (const auto next = std::next(hole); next != holes.end() && next->first == slot.offset + slot.size) {
    hole->second += next->second;
    holes.erase(next);
  }
  if (hole != holes.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      holes.erase(hole);
    }
  }
  used_bytes -= slot.size;
}

void HostRows::add(at::Tensor slab) {
  const int64_t nbytes = slab.numel();
  slabs_.push_back({std::move(slab), {{0, nbytes}}});
}

void HostRows::clear() {
  slabs_.clear();
  used_bytes = 0;
}

} // namespace memplug
