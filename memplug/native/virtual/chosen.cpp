// Operators that choose elements by a mask: how many there are, no data says; it is a share of the mask, the same for all.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "kernels.h"

namespace memplug {
namespace {

// The host waits for the number, as on CUDA.
int64_t chosen(int64_t elements) {
  VirtualDevice& device = VirtualDevice::get();
  device.copy(Link::TO_HOST, static_cast<int64_t>(sizeof(int64_t)), true);
  return std::llround(static_cast<double>(elements) * device.true_share);
}

at::Tensor masked_select(const at::Tensor& self, const at::Tensor& mask) {
  int64_t elements = 1;
  for (const int64_t size : at::infer_size(self.sizes(), mask.sizes())) {
    elements *= size;
  }
  at::Tensor output = at::empty({chosen(elements)}, self.options());
  VirtualDevice::get().run({"aten::masked_select", {shape_of(self), shape_of(mask)}, {shape_of(output)}});
  return output;
}

at::Tensor nonzero(const at::Tensor& self) {
  at::Tensor output = at::empty({chosen(self.numel()), self.dim()}, self.options().dtype(at::kLong));
  VirtualDevice::get().run({"aten::nonzero", {shape_of(self)}, {shape_of(output)}});
  return output;
}

} // namespace

void register_chosen(torch::Library& aten) {
  aten.impl("masked_select", TORCH_FN(masked_select));
  aten.impl("nonzero", TORCH_FN(nonzero));
}

} // namespace memplug
