// Gives autograd back the tensors that a frame's forward saved.
#include <algorithm>

#include "frame.h"

namespace memplug {

void Frame::restore_here(size_t index) {
  if (is_opaque && !keeps) {
    forward.note_stale();
    if (forward.saved[index].stale) {
      forward.changed(index)->fail();
    }
  }
  restored_on_ = flow->transfer->streams().current();
  restore();
}

at::Tensor Frame::take(size_t index) {
  at::Tensor found = forward.take(index);
  flow->transfer->order_use(found, restored_on_);
  return found;
}

const at::Tensor& Frame::ordered(const at::Tensor& tensor) const {
  for (const StreamRef& stream : streams_) {
    flow->transfer->order_use(tensor, stream);
  }
  return tensor;
}

at::Tensor Frame::view(size_t index) {
  const Forward::Saved& saved = forward.saved.at(index);
  const CapturedTensor& part = parts_.at(saved.use.storage);
  const auto made = [&](const at::Tensor& tensor, bool is_read_later) {
    return tensor_at(may_be_written(saved) && is_read_later ? copy_of(tensor) : tensor, saved.use.geometry);
  };
  if (part.kept != nullptr) {
    const at::Tensor& tensor = part.kept->get();
    return made(part.kept->written ? ordered(tensor) : tensor, recomputes && !is_restored);
  }
  // other regions may share, and still read, an input that is resident
  const bool is_read_later =
      part.swapped->uses_left > 1 || (part.swapped->resident && input_of(saved.use.storage) != nullptr);
  const at::Tensor found = made(flow->transfer->acquire(*part.swapped).first, is_read_later);
  consume(part.swapped);
  if (!part.swapped->tensor.defined()) {
    flow->ledger->restored.add(found);
  }
  return found;
}

at::Tensor Frame::given(size_t index) const {
  const Forward::Saved& saved = forward.saved.at(index);
  const at::Tensor& tensor = forward.given[saved.use.storage].tensor;
  const auto is_read_later = [&] {
    if (forward.is_input(saved.use.storage) && !c10::isIntegralType(saved.use.geometry.dtype, true)) {
      return true; // other regions may share the input, and still read it
    }
    if (!recomputes || is_restored || decisions == nullptr) {
      return false;
    }
    const auto& reads = decisions->reads;
    return std::find(reads.begin(), reads.end(), saved.use.storage) != reads.end();
  };
  const bool is_parameter = tensor.is_leaf() && tensor.requires_grad();
  const bool copied = may_be_written(saved) && !is_parameter && is_read_later();
  return tensor_at(copied ? copy_of(tensor) : tensor, saved.use.geometry);
}

// Returns whether backward's kernels may write to a saved tensor. Unobserved kernels may, since some write a gradient
// over the saved tensor.
bool Frame::may_be_written(const Forward::Saved& saved) const {
  return saved.in_unit || is_opaque;
}

void Frame::consume(const std::shared_ptr<Swapped>& part) {
  if (part->resident && !part->slot && keeps_graph()) {
    return; // the host has no copy, and a later backward may read the tensor again
  }
  if (--part->uses_left <= 0) {
    part->uses_left = part->uses;
    flow->transfer->drop(part);
  }
}

Substitute Frame::substitute(size_t index) {
  Substitute found;
  for (const CapturedTensor& part : captures_.at(index).parts) {
    if (part.kept != nullptr) {
      ordered(part.kept->tensor);
      found.tensors.push_back(part.kept->fresh());
      continue;
    }
    auto [tensor, rows] = flow->transfer->acquire(*part.swapped);
    if (rows < tensor.size(0)) {
      found.rows = rows;
    }
    consume(part.swapped);
    // the recompute pass repeats the forward's writes; if the tensor stays for a later backward, they go to a copy
    const bool stays = part.swapped->mutated && part.swapped->tensor.defined();
    found.tensors.push_back(stays ? copy_of(tensor) : alias_of(tensor));
  }
  return found;
}

void Frame::forget() {
  for (size_t i = 0; i < forward.saved.size(); ++i) {
    forward.forget(i);
  }
}

at::Tensor Frame::base_of(int32_t storage, size_t end, std::vector<std::shared_ptr<Swapped>>& read) {
  if (const auto found = written.find(storage); found != written.end()) {
    ordered(found->second->tensor);
    return found->second->fresh();
  }
  if (const auto input = input_of(storage)) {
    const at::Tensor tensor = flow->transfer->acquire(*input).first;
    read.push_back(input);
    return input->mutated ? copy_of(tensor) : tensor;
  }
  // writes are no error while the forward still runs
  const bool changes = !is_over_ || changing.count(storage) > 0;
  return ordered(forward.given_again(storage, forward.storages.regathered[storage], changes, end));
}

Frame::Restoration Frame::begin_pass() {
  Restoration pass{recomputed(), {}, {}, Bases(tape->nbytes.size())};
  for (const size_t index : pass.indices) {
    pass.wanted.push_back(&forward.saved[index].use);
  }
  // the storages still wanted: fewer than `decisions->wanted` if parts of the autograd graph have died
  const auto wanted = storages_of(pass.indices);
  const auto reads = wanted == decisions->wanted ? decisions->reads : read_by(*tape, decisions->actions, wanted);
  const auto last = std::find_if(decisions->actions.rbegin(), decisions->actions.rend(), [](Action action) {
    return action != Action::SKIP;
  });
  const auto end = static_cast<size_t>(decisions->actions.rend() - last);
  forward.check_read(end);
  for (const int32_t storage : reads) {
    pass.bases[storage] = base_of(storage, end, pass.inputs);
  }
  return pass;
}

void Frame::end_pass(const Restoration& pass, const std::vector<at::Tensor>& found) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (forward.saved[pass.indices[i]].alive) {
      forward.restore(pass.indices[i], found[i]);
    }
  }
  for (const auto& input : pass.inputs) {
    consume(input);
  }
}

} // namespace memplug
