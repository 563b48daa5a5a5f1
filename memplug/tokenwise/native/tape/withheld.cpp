// Withheld tensors (memplug/hooks/withheld.py): a region's forward put them into an argument, such as a key-value
// cache, but the argument does not keep them. memplug can recompute them while their autograd graph exists.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "registry.h"
#include "layouts.h"
#include "running.h"
#include "saved_type.h"
#include "torch_private_csrc.h"

namespace py = pybind11;

namespace memplug {
namespace {

struct WithheldTensor {
  // Describes a tensor of the forward that this thread runs, even while observing is paused. The storage of `use` is -1
  // without such a forward, or if the tape cannot describe the tensor.
  explicit WithheldTensor(const at::Tensor& tensor) {
    Running* const running = Running::current();
    if (running == nullptr || !is_plain(tensor)) {
      return;
    }
    const Storages& storages = running->forward.storages;
    if (const int32_t storage = storages.find(tensor); storage >= 0) {
      frame = running->weak_from_this();
      use = {{0}, storage, Geometry::of(tensor, storages.origins[storage])};
    }
    if (tensor.requires_grad()) {
      edge = torch::autograd::impl::gradient_edge(tensor);
    }
  }

  std::weak_ptr<Frame> frame; // the forward's frame, which lives as long as its graph
  Use use{{0}, -1, {}};
  torch::autograd::Edge edge; // the tensor's place in the autograd graph
};

// Recomputes tensors that one forward made, and attaches them to the autograd graph. Returns none if one of them cannot
// be recomputed.
std::optional<py::list> made_again(const std::vector<const WithheldTensor*>& all) {
  const auto frame = all.front()->frame.lock();
  if (frame == nullptr || !frame->is_over() || frame->is_opaque) {
    return std::nullopt;
  }
  std::vector<Use> uses;
  for (const WithheldTensor* const each : all) {
    if (each->use.storage < 0) {
      return std::nullopt;
    }
    uses.push_back(each->use);
  }
  const auto found = frame->again(frame->tape, uses);
  if (!found) {
    return std::nullopt;
  }
  py::list tensors;
  for (size_t i = 0; i < all.size(); ++i) {
    at::Tensor tensor = (*found)[i].detach();
    if (all[i]->edge.is_valid()) {
      torch::autograd::impl::set_gradient_edge(tensor, all[i]->edge);
    }
    tensors.append(wrapped(tensor));
  }
  return tensors;
}

const Registered withheld_part({Level::ASKING, [](py::module_& module) {
  py::class_<WithheldTensor>(module, "WithheldTensor").def(py::init([](py::handle tensor) {
    return WithheldTensor(tensor_of(tensor));
  }));
  module.def("made_again", &made_again);
}});

} // namespace
} // namespace memplug
