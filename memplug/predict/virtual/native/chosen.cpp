// Operators that choose elements by a mask. The number of chosen elements comes from `VirtualDevice::answer`; without
// an answer it is the fraction `VirtualDevice::true_share` of the mask's elements.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "kernels.h"

namespace memplug {
namespace {

// Returns the number of chosen elements. As on CUDA, the host waits for it.
int64_t chosen(const Work& work, int64_t elements) {
  VirtualDevice& device = VirtualDevice::get();
  device.copy(CopyDirection::TO_HOST, static_cast<int64_t>(sizeof(int64_t)), true);
  const auto answer = device.answer(work);
  return answer ? answer->front().size(0) : std::llround(static_cast<double>(elements) * device.true_share);
}

at::Tensor masked_select(const at::Tensor& self, const at::Tensor& mask) {
  int64_t elements = 1;
  for (const int64_t size : at::infer_size(self.sizes(), mask.sizes())) {
    elements *= size;
  }
  Work work{"aten::masked_select", {shape_of(self), shape_of(mask)}, {}};
  at::Tensor output = at::empty({chosen(work, elements)}, self.options());
  work.outputs = {shape_of(output)};
  VirtualDevice::get().run(work);
  return output;
}

at::Tensor nonzero(const at::Tensor& self) {
  Work work{"aten::nonzero", {shape_of(self)}, {}};
  at::Tensor output = at::empty({chosen(work, self.numel()), self.dim()}, self.options().dtype(at::kLong));
  work.outputs = {shape_of(output)};
  VirtualDevice::get().run(work);
  return output;
}

} // namespace

void register_chosen(torch::Library& aten) {
  aten.impl("masked_select", TORCH_FN(masked_select));
  aten.impl("nonzero", TORCH_FN(nonzero));
}

} // namespace memplug
