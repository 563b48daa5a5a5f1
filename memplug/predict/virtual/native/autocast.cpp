// Registers autocast on the virtual device, for the operators in torch's own lists.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "kernels.h"

namespace memplug {

void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto& any = *new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  any.fallback(torch::CppFunction::makeFallthrough());
  auto& m = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__); // the macros use the name `m`
#define KERNEL_SAME_SIGNATURE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define KERNEL_SAME_SIGNATURE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define KERNEL_SAME_SIGNATURE_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define KERNEL_SAME_SIGNATURE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  using namespace at; // the macros use its names
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(KERNEL_SAME_SIGNATURE_LOWER)
  AT_FORALL_FP32(KERNEL_SAME_SIGNATURE_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(KERNEL_SAME_SIGNATURE_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(KERNEL_SAME_SIGNATURE_PROMOTE)
}

} // namespace memplug
