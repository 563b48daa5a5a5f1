// Notes the tensors that autograd saves in a forward, and hands out those that a recompute pass has restored.
#include <algorithm>
#include <memory>

#include "forward.h"
#include "layouts.h"
#include "replay.h"
#include "transfer.h"
#include "versions.h"

namespace memplug {
namespace {

// Returns a tensor without its autograd graph, which may refer back to the frame that saves the tensor.
at::Tensor without_graph(const at::Tensor& tensor) {
  return tensor.is_leaf() ? tensor : tensor.detach();
}

} // namespace

Forward::~Forward() {
  for (size_t i = 0; i < saved.size(); ++i) {
    forget(i);
  }
}

void Forward::save(const at::Tensor& tensor, bool held) {
  Saved found;
  found.use = {{0}, -1, {}};
  if (held || !is_plain(tensor)) {
    found.held = without_graph(tensor);
  } else {
    int32_t storage = storages.find(tensor);
    if (storage < 0) {
      // the running operator made the tensor, unless the tensor is given, as a parameter is
      const bool own = running_ && !(tensor.is_leaf() && tensor.requires_grad());
      storage = number(tensor, !own);
      if (own) {
        saved_early_.emplace_back(storage, alias_of(tensor));
      }
    }
    if (storages.given[storage] && !is_captured(storage)) {
      give(storage, tensor, begun_);
    } else if (!unit_saves_) { // `end_unit` counts what a unit saves, once it knows what the unit made
      count(storage);
    }
    found.use = {{0}, storage, Geometry::of(tensor, storages.origins[storage])};
    if (holds || holds_meanwhile) {
      found.kept = tensor.is_leaf() ? tensor : alias_of(tensor);
    }
  }
  found.counter = version_counter_of(tensor);
  found.version = found.counter.enabled() ? found.counter.current_version() : 0;
  const Save save{found.use, begun_};
  if (followed_ != nullptr && !(saved.size() < followed_->saves.size() && followed_->saves[saved.size()] == save)) {
    depart(begun_);
  }
  if (followed_ == nullptr) {
    noted_->saves.push_back(save);
  }
  found.largest_bytes = largest_saved_bytes;
  found.in_unit = unit_saves_.has_value();
  saved.push_back(std::move(found));
}

void Forward::count(int32_t storage) {
  if (!counted_[storage]) {
    counted_[storage] = true;
    saved_bytes += storages.nbytes[storage];
    pending_bytes += is_captured(storage) ? 0 : storages.nbytes[storage];
    kept_bytes += captured_[storage].kept ? storages.nbytes[storage] : 0;
    largest_saved_bytes = std::max(largest_saved_bytes, storages.nbytes[storage]);
  }
}

void Forward::sort(bool direct) {
  for (Saved& each : saved) {
    const int32_t storage = each.use.storage;
    each.way = Way::HELD;
    if (storage < 0) {
      continue;
    }
    const Geometry& geometry = each.use.geometry;
    const CapturedStorage& captured = captured_[storage];
    const GivenMemory& kept = given[storage];
    const bool is_stale = std::find(stale_.begin(), stale_.end(), storage) != stale_.end();
    const bool matches = captured.dtype == geometry.dtype && !geometry.conj && !geometry.neg;
    if (captured.rows == WHOLE && direct && matches && !is_stale) {
      each.way = Way::VIEW;
    } else if (!kept.tensor.defined() || storages.regathered[storage]) {
      each.way = Way::RECOMPUTED;
    }
  }
}

void Forward::let_go() {
  for (Saved& each : saved) {
    each.kept.reset();
  }
}

void Forward::keep(size_t index, const at::Tensor& tensor) {
  saved[index].kept = tensor;
  if (storages.find(tensor) < 0) {
    storages.alias(tensor, saved[index].use.storage);
  }
}

void Forward::restore(size_t index, const at::Tensor& tensor) {
  forget(index);
  Saved& each = saved[index];
  each.restored_bytes = memory_bytes(tensor);
  each.restored = tensor;
  each.restored_version = version_of(tensor);
  ledger_->recomputed_bytes += each.restored_bytes;
}

at::Tensor Forward::take(size_t index) {
  at::Tensor tensor = saved[index].restored;
  const uint32_t version = saved[index].restored_version;
  forget(index);
  ledger_->restored.add(tensor);
  check_version(tensor, version, "tensor");
  return tensor;
}

void Forward::hold(size_t index, const at::Tensor& tensor) {
  saved[index].taken = tensor;
  saved[index].taken_version = version_of(tensor);
}

at::Tensor Forward::held_again(size_t index) const {
  const Saved& each = saved[index];
  if (each.taken.defined()) {
    check_version(each.taken, each.taken_version, "tensor");
  }
  return each.taken;
}

void Forward::forget(size_t index) {
  if (saved[index].restored.defined()) {
    ledger_->recomputed_bytes -= saved[index].restored_bytes;
    saved[index].restored.reset();
  }
}

} // namespace memplug
