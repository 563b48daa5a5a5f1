// Replaces every CUDA kernel of aten when this library is loaded, which is when torch first counts devices.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <set>
#include <unordered_map>

#include "../runtime/settings.h"
#include "operators.h"

namespace cudasim {
namespace {

const std::set<std::string>& own_of_torch() { // operators that launch no kernel
  static const auto* names = new std::set<std::string>{
      "aten::empty",          "aten::empty_strided",     "aten::set_",
      "aten::resize_",        "aten::record_stream",     "aten::_local_scalar_dense",
      "aten::is_set_to",      "aten::_fused_sdp_choice", "aten::cudnn_is_acceptable",
      "aten::_efficientzerotensor", "aten::_resize_output_", "aten::_pin_memory",
      "aten::is_pinned",      "aten::_use_cudnn_ctc_loss", "aten::_reshape_alias_copy",
      "aten::_has_same_storage_numel", "aten::resize_as_", "aten::_unsafe_view"};
  return *names;
}

std::unordered_map<c10::OperatorName, Info>& infos() {
  static auto* instance = new std::unordered_map<c10::OperatorName, Info>();
  return *instance;
}

Compute compute_of(const c10::FunctionSchema& schema) {
  static const auto* known = [] {
    auto* all = new std::map<std::string, Compute>(attention_operators());
    all->merge(other_operators());
    return all;
  }();
  const auto found = known->find(schema.name());
  return found != known->end() && schema.overload_name().empty() ? found->second : Compute();
}

// Returns the argument that a result aliases; -1: a new tensor.
int alias_of(const c10::Argument& result, const std::vector<c10::Argument>& arguments) {
  for (size_t i = 0; i < arguments.size() && result.alias_info() != nullptr; ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

Info describe(const c10::FunctionSchema& schema) {
  Info info;
  info.name = schema.name().substr(6); // without aten::
  const auto& arguments = schema.arguments();
  bool in_place = !schema.returns().empty() || schema.is_mutable();
  const bool is_batch_norm = // in training it writes to its statistics, which its schema does not say
      info.name.find("batch_norm") != std::string::npos && info.name.find("backward") == std::string::npos;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool is_statistic = is_batch_norm && arguments[i].name().rfind("running_", 0) == 0;
    info.written.push_back((alias != nullptr && alias->isWrite()) || is_statistic);
    info.out.push_back(info.written.back() && arguments[i].is_out());
    in_place = in_place && !info.out.back();
    if (arguments[i].type()->str().find("Generator") != std::string::npos) {
      info.generator = static_cast<int>(i);
    } else if (arguments[i].name() == "dropout_p") {
      info.dropout = static_cast<int>(i);
    }
  }
  for (const auto& result : schema.returns()) {
    info.alias.push_back(alias_of(result, arguments));
    in_place = in_place && info.alias.back() >= 0;
    info.tensors_only = info.tensors_only && result.type()->str().find("Tensor") != std::string::npos;
  }
  info.only_in_place = in_place;
  info.convolves = info.name == "cudnn_convolution";
  info.compute = compute_of(schema);
  const bool attends = info.name.find("attention") != std::string::npos && info.name.find("backward") == std::string::npos;
  info.draws = info.generator >= 0 || info.name == "native_dropout" || info.name == "_fused_dropout" || attends;
  return info;
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
}

// Fills new memory with NaN on its stream, so that a use on another stream without a wait gives NaN.
Tensor poisoned(Tensor tensor) {
  if (tensor.numel() > 0) {
    C10_CUDA_CHECK(cudaMemsetAsync(tensor.data_ptr(), 0xFF, tensor.storage().nbytes(),
                                   c10::cuda::getCurrentCUDAStream().stream()));
  }
  return tensor;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  return poisoned(Tensor(at::detail::empty_cuda(size, dtype, layout, device, pin, format)));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  return poisoned(Tensor(at::detail::empty_strided_cuda(size, stride, dtype, layout, device, pin)));
}

void take_over(const c10::OperatorName& name, c10::KernelFunction kernel) {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>();
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel),
                                                                     std::nullopt, nullptr, "cudasim"));
}

void take_over_all() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    const bool of_aten = op && name.name.rfind("aten::", 0) == 0 && own_of_torch().count(name.name) == 0;
    if (of_aten && !is_view(op->schema())) {
      infos().emplace(name, describe(op->schema()));
      take_over(name, c10::KernelFunction::makeFromBoxedFunction<&call>());
    }
  }
  const c10::OperatorName copy("aten::copy_", "");
  infos().emplace(copy, describe(dispatcher.findSchema(copy)->schema()));
  take_over(copy, c10::KernelFunction::makeFromBoxedFunction<&call_copy>());
  if (settings().poison) {
    take_over({"aten::empty", "memory_format"}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&empty));
    take_over({"aten::empty_strided", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&empty_strided));
  }
}

struct Silent final : c10::WarningHandler { // torch warns of each kernel that is replaced
  void process(const c10::Warning&) override {}
};

const bool loaded = [] {
  Silent silent;
  auto* const before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&silent);
  take_over_all();
  c10::WarningUtils::set_warning_handler(before);
  return true;
}();

} // namespace

const Info& info_of(const c10::OperatorHandle& op) {
  return infos().at(op.operator_name());
}

} // namespace cudasim
