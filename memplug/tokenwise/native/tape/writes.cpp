// Saves memory before a forward writes to it, and gradients before a forward accumulates into them, so that a recompute
// pass finds both as they were before the forward.
#include "calls.h"
#include "clock.h"
#include "layouts.h"
#include "running.h"
#include "saved_type.h"

namespace py = pybind11;

namespace memplug {

void Running::before_write(int32_t storage, const at::Tensor& tensor) {
  const Locked locked;
  if (outer_ != nullptr && forward.storages.given[storage]) {
    outer_->forward.protect({tensor});
  }
  remember(tensor);
  Frame::before_write(storage, tensor);
}

void Running::before_write_elsewhere(const at::Tensor& tensor) {
  Frame::before_write_elsewhere(tensor);
  remember(tensor);
}

void Running::before_foreign_write(int32_t storage, const at::Tensor& tensor) {
  if (calls().executor.is_scratch(executor_, wrapped(tensor))) {
    changing.insert(storage);
    return;
  }
  // no code outside of the region holds a literal, so a recompute pass may write to a copy
  if (forward.is_literal(storage)) {
    const auto former = std::make_shared<Held>(tensor, false);
    former->before_write();
    written.emplace(storage, former);
    return;
  }
  if (written.count(storage) > 0) { // an argument's memory: `remember` has saved its former value
    return;
  }
  changing.insert(storage);
  note(tensor);
}

void Running::note(const at::Tensor& tensor) {
  if (buffers.is_none()) {
    buffers = calls().executor.written_buffers(executor_);
  }
  calls().buffers.note(buffers, wrapped(tensor));
}

void Running::before_accumulating(const at::Tensor& gradient) {
  const Suspension own;
  const int32_t storage = is_plain(gradient) ? forward.storages.find(gradient) : -1;
  if (is_plain(gradient) && changing.count(storage) == 0) {
    note(gradient);
  }
}

py::list Running::leaves() const {
  py::list found;
  for (const GivenMemory& each : forward.given) {
    if (each.tensor.defined() && each.tensor.is_leaf() && each.tensor.requires_grad()) {
      found.append(py::make_tuple(wrapped(each.tensor), each.had_gradient));
    }
  }
  return found;
}

// Saves the values of held arguments that lie in the memory of `tensor`, which is about to change.
void Running::remember(const at::Tensor& tensor) {
  for (const Item& item : items_) {
    const at::Tensor* const held = item.held != nullptr ? &item.held->tensor : nullptr;
    if (held != nullptr && is_plain(*held) && held->is_alias_of(tensor)) {
      item.held->before_write();
      if (input_of(item.storage) == nullptr) { // no other argument in this memory was swapped
        written.emplace(item.storage, item.held);
      }
    }
  }
}

} // namespace memplug
