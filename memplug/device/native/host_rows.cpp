#include "host_rows.h"

#include <algorithm>
#include <iterator>

#include "views.h"

namespace memplug {
namespace {

std::vector<int64_t> dense_strides(at::IntArrayRef size) {
  std::vector<int64_t> strides(size.size(), 1);
  for (size_t i = size.size() - 1; i-- > 0;) {
    strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  return strides;
}

} // namespace

std::optional<Slot> HostRows::take(int64_t nbytes) {
  const int64_t size = (nbytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
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

// Returns the slot's memory as a tensor of the same shape as `rows`.
at::Tensor HostRows::rows_at(const Slot& slot, const at::Tensor& rows) const {
  const auto strides = rows.is_non_overlapping_and_dense() ? rows.strides().vec() : dense_strides(rows.sizes());
  const int64_t offset = slot.offset / static_cast<int64_t>(rows.element_size());
  return view_of(slab(slot), rows.sizes(), strides, offset, rows.scalar_type(), rows.is_conj(), rows.is_neg());
}

void HostRows::copy_out(Streams& streams, const StreamRef& stream, const Slot& slot, const at::Tensor& rows) {
  streams.copy(stream, rows_at(slot, rows), rows);
}

void HostRows::copy_in(Streams& streams, const StreamRef& stream, const at::Tensor& rows, const Slot& slot) {
  streams.copy(stream, rows, rows_at(slot, rows));
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
