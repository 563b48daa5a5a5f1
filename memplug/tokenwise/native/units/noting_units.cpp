// Methods of `Forward` that note units (unit.h), and find the effects of unobserved code.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <utility>

#include "forward.h"
#include "replay.h"
#include "torch_private_csrc.h"
#include "transfer.h"
#include "unfilled.h"
#include "versions.h"

namespace memplug {

at::Tensor Forward::whole(const at::Tensor& tensor) {
  const auto nbytes = static_cast<int64_t>(tensor.storage().nbytes());
  if (tensor.storage_offset() == 0 && static_cast<int64_t>(tensor.nbytes()) == nbytes &&
      tensor.is_non_overlapping_and_dense()) {
    return tensor;
  }
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  const bool fits = nbytes % itemsize == 0;
  const auto dtype = fits ? tensor.scalar_type() : at::kByte;
  return alias_at(tensor, {{1, fits ? nbytes / itemsize : nbytes}, {nbytes, 1}, 0, dtype, false, false});
}

void Forward::begin_unit(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  begin(op, arguments);
  unit_saves_ = saved.size();
}

std::vector<Source> Forward::end_unit(
    const Operator& part,
    const at::Tensor& token,
    const std::vector<at::Tensor>& returned,
    const std::vector<at::Tensor>& lasting) {
  const auto early = std::exchange(saved_early_, {});
  const size_t first = *unit_saves_;
  unit_saves_.reset();
  end({c10::IValue(token)});
  std::vector<Source> parts;
  const auto note = [&](const at::Tensor& tensor, Source source) {
    const std::array<c10::IValue, 2> arguments{token, static_cast<int64_t>(parts.size())};
    begin(part, arguments);
    end({c10::IValue(whole(tensor))});
    parts.push_back(source);
  };
  for (const auto& [storage, tensor] : early) {
    const bool lasts = std::any_of(
        lasting.begin(), lasting.end(), [&, &own = tensor](const auto& each) { return each.is_alias_of(own); });
    if (lasts) {
      storages.given[storage] = true;
      give(storage, tensor, begun_);
      continue;
    }
    const auto save = std::find_if(
        saved.begin() + static_cast<int64_t>(first),
        saved.end(),
        [number = storage](const Saved& each) { return each.use.storage == number; });
    saved_early_.emplace_back(storage, tensor);
    note(tensor, {true, static_cast<size_t>(save - saved.begin()) - first});
  }
  for (size_t i = 0; i < returned.size(); ++i) {
    // a parameter that the call returns, such as a bias that later code adds, is no part of the unit
    const bool is_parameter = returned[i].is_leaf() && returned[i].requires_grad();
    if (storages.find(returned[i]) < 0 && !is_parameter) {
      note(returned[i], {false, i});
    }
  }
  for (size_t i = first; i < saved.size(); ++i) {
    const int32_t storage = saved[i].use.storage;
    saved[i].largest_bytes = largest_saved_bytes;
    if (storage >= 0 && !(storages.given[storage] && !is_captured(storage))) {
      count(storage);
    }
  }
  return parts;
}

at::Tensor Forward::bytes_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor.contiguous().reshape({-1}).view(at::kByte);
}

bool Forward::hides(
    const Progress& since, const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) const {
  const auto& [begun, saves, unobserved] = since;
  Tape part;
  const auto& records = tape().records;
  part.records.assign(records.begin() + static_cast<int64_t>(begun), records.begin() + static_cast<int64_t>(begun_));
  for (size_t i = saves; i < saved.size(); ++i) {
    if (saved[i].use.storage >= 0) {
      part.saves.push_back({saved[i].use, begun_});
    }
  }
  bool unknown = false;
  for (const at::Tensor& tensor : returned) {
    const int32_t storage = storages.find(tensor);
    const bool is_given =
        std::any_of(given.begin(), given.end(), [&](const at::Tensor& each) { return each.is_alias_of(tensor); });
    unknown = unknown || (storage < 0 && !is_given);
    if (storage >= 0) {
      part.saves.push_back({{{0}, storage, Geometry::of(tensor, storages.origins[storage])}, begun_});
    }
  }
  part.nbytes = storages.nbytes;
  return unknown || unobserved_ > unobserved || has_unfilled(part);
}

std::vector<size_t> Forward::written_unseen(
    size_t begun,
    const std::vector<at::Tensor>& given,
    const std::vector<uint32_t>& versions,
    const std::vector<at::Tensor>& before,
    const std::vector<at::Tensor>& returned) const {
  const auto& records = tape().records;
  std::vector<size_t> written;
  for (size_t i = 0; i < given.size(); ++i) {
    const bool comes_back =
        std::any_of(returned.begin(), returned.end(), [&](const auto& each) { return each.is_alias_of(given[i]); });
    const bool changed = version_of(given[i]) != versions[i] ||
        (i < before.size() && before[i].defined() && !at::equal(before[i], bytes_of(given[i])));
    if (!(changed || comes_back)) {
      continue;
    }
    const int32_t storage = storages.find(given[i]);
    const bool is_seen = std::any_of(
        records.begin() + static_cast<int64_t>(begun),
        records.begin() + static_cast<int64_t>(begun_),
        [&](const Record& each) { return each.writes(storage); });
    if (!is_seen) {
      written.push_back(i);
    }
  }
  return written;
}

bool Forward::writes_elsewhere(size_t begun, const std::vector<at::Tensor>& given) const {
  const auto& records = tape().records;
  for (size_t i = begun; i < begun_; ++i) {
    for (const int32_t storage : records[i].written) {
      const bool is_given = std::any_of(
          given.begin(), given.end(), [&](const at::Tensor& each) { return storages.find(each) == storage; });
      if (storages.given[storage] && !is_given) {
        return true;
      }
    }
  }
  return false;
}

bool Forward::may_be_unfinished(const at::Tensor& tensor) const {
  const auto is_elsewhere = [](const at::Tensor& each) {
    const auto& node = each.grad_fn();
    const auto stream = node != nullptr ? node->stream() : std::nullopt;
    return stream && *stream != c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device());
  };
  if (!is_elsewhere(tensor) && !(tensor.is_view() && is_elsewhere(at::Tensor(tensor._base())))) {
    return false;
  }
  const int32_t storage = storages.find(tensor);
  const auto& records = tape().records;
  return std::none_of(
      records.begin(), records.begin() + static_cast<int64_t>(begun_), [&](const Record& each) {
        return each.reads(storage) && each.op->reads_elements;
      });
}

void Forward::protect(const std::vector<at::Tensor>& given) {
  for (const at::Tensor& tensor : given) {
    if (may_be_unfinished(tensor)) {
      continue;
    }
    const int32_t storage = meet(tensor, begun_);
    if ((storages.given[storage] && !own_[storage]) || is_captured(storage)) {
      own_[storage] = true;
      listener_->before_write(storage, tensor);
      captured_[storage] = {};
    }
  }
}

void Forward::blind_to_writes(const std::vector<at::Tensor>& given, const std::vector<size_t>& written) {
  for (const size_t i : written) {
    const int32_t storage = storages.find(given[i]);
    if (storage >= 0 && storages.given[storage] && !own_[storage] && !holds) {
      throw Failure(Failure::GIVEN_WAS_WRITTEN, given[i].sizes());
    }
    blind(UNOBSERVED);
    stale_.push_back(storage);
  }
}

bool Forward::communicates(size_t begun) const {
  const auto& records = tape().records;
  return std::any_of(
      records.begin() + static_cast<int64_t>(begun), records.begin() + static_cast<int64_t>(begun_), [](const Record& each) {
        return each.op->has(COMMUNICATES) || each.op->has(EXCHANGE) || each.op->has(COLLECTIVE) || each.op->has(SHARED);
      });
}

void Forward::fail_unit() {
  unit_saves_.reset();
  end({});
}

} // namespace memplug
