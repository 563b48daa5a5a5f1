// Operators of the virtual device: torch's meta kernels determine the outputs, and `Costs` the duration.
//
// An operator counts as one kernel if it has a CPU kernel, if it is a `_foreach_` operator, or if it is in `kFused`
// (CUDA has kernels for the latter two). Other operators are decomposed.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace memplug {
namespace {

constexpr std::array kFused = {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};
constexpr std::string_view kForeach = "aten::_foreach_"; // operators on many tensors at once

// Replaces each tensor in a value, which may be a tensor or a list of tensors, by `change(tensor)`.
template <typename Change>
void each_tensor(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    value = std::move(changed);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    value = std::move(changed);
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns whether an operator's outputs or their sizes depend on values; for `index`, whether an index is a mask.
bool depends_on_values(const c10::OperatorHandle& op, const std::vector<TensorShape>& inputs) {
  if (op.schema().name() == "aten::index") {
    return std::any_of(inputs.begin() + 1, inputs.end(), [](const TensorShape& each) {
      return each.dtype == "Bool" || each.dtype == "Byte";
    });
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// Tries to return an answer as the operator's outputs, in place of the meta kernel. Returns false, and changes nothing,
// if the operator does not depend on values or there is no answer.
bool run_as_answered(const c10::OperatorHandle& op, const Work& work, torch::jit::Stack* stack) {
  if (work.inputs.empty() || !depends_on_values(op, work.inputs)) {
    return false;
  }
  VirtualDevice& device = VirtualDevice::get();
  const auto answer = device.answer(work);
  if (!answer) {
    return false;
  }
  device.copy(CopyDirection::TO_HOST, static_cast<int64_t>(sizeof(int64_t)), true);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const at::Tensor& tensor : *answer) {
    stack->push_back(tensor.is_meta() ? c10::IValue(tensor) : c10::IValue(tensor.item()));
  }
  return true;
}

// Runs any operator by its meta kernel. If the operator returns an argument that it writes to, the caller gets that
// argument back; all other outputs are new tensors.
void run_as_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::DisableRecordFunctionGuard one; // observers see one kernel, not the operators of its meta kernel
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const size_t first = stack->size() - arguments.size();
  Work work{op.schema().name(), {}, {}};
  std::vector<c10::IValue> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const bool is_out = is_written(arguments[i]) && arguments[i].kwarg_only();
    if (is_written(arguments[i])) {
      written.push_back(value);
    }
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_virtual(tensor) && !is_out) {
        work.inputs.push_back(shape_of(tensor));
      }
      return on_meta(tensor);
    });
    if (value.isDevice() && value.toDevice().type() == kVirtual) {
      value = c10::Device(c10::kMeta);
    }
  }
  if (!run_as_answered(op, work, stack)) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  }
  auto next_written = written.begin();
  for (size_t i = 0; i < returns.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - returns.size() + i];
    if (is_written(returns[i])) {
      TORCH_INTERNAL_ASSERT(next_written != written.end(), op.schema().name(), " returns a written tensor that is not an argument");
      if (value.isTensor()) {
        at::native::resize_output(next_written->toTensor(), value.toTensor().sizes());
      }
      value = *next_written++;
    } else {
      each_tensor(value, [](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_meta() ? like(tensor) : tensor;
      });
    }
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_virtual(tensor)) {
        work.outputs.push_back(shape_of(tensor));
      }
      return tensor;
    });
  }
  if (returns.empty()) { // an in-place operator on lists returns nothing, but writes to its arguments
    for (c10::IValue& value : written) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        work.outputs.push_back(shape_of(tensor));
        return tensor;
      });
    }
  }
  VirtualDevice::get().run(work);
}

// -- memory and views -------------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, c10::GetAllocator(kVirtual), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kVirtual), keys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const auto needed = static_cast<size_t>((impl->storage_offset() + impl->numel()) * self.element_size());
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    storage->set_data_ptr_noswap(c10::GetAllocator(kVirtual)->allocate(needed));
    storage->set_nbytes(needed);
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (self.storage().data_ptr()) {
    VirtualDevice::get().memory.use_on(self.storage().mutable_data_ptr().get(), stream.id());
  }
}

// -- copies -----------------------------------------------------------------------------------------------------------------

// A program may read a copy to the host. So without an answer, copies are filled with ones: up to `kAwaitedBytes` if
// the program waits for the copy, otherwise up to `kReadBytes`. Larger copies stay uninitialised.
constexpr int64_t kReadBytes = 1 << 16, kAwaitedBytes = 1 << 26;

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  VirtualDevice& device = VirtualDevice::get();
  if (is_virtual(self) && is_virtual(destination)) {
    device.run({"aten::copy_", {shape_of(self)}, {shape_of(destination)}});
  } else {
    const CopyDirection direction = is_virtual(self) ? CopyDirection::TO_HOST : CopyDirection::TO_DEVICE;
    const auto nbytes = static_cast<int64_t>(destination.numel() * destination.element_size());
    device.copy(direction, nbytes, !non_blocking);
    if (direction == CopyDirection::TO_HOST && (!non_blocking || nbytes <= kReadBytes)) {
      if (const auto answer = device.answer({"aten::_to_copy", {shape_of(self)}, {}}, !non_blocking)) {
        destination.copy_(answer->front());
      } else if (nbytes <= kAwaitedBytes) {
        destination.fill_(1);
      }
    }
  }
  return destination;
}

// Replaces torch's `copy_`, which would run `_copy_from` as a second operator.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.is_same(source)) {
    copy_from(source, self, non_blocking);
  }
  return self;
}

// Returns a number that the host waits for and reads; without an answer it is 1.
at::Scalar local_scalar(const at::Tensor& self) {
  VirtualDevice& device = VirtualDevice::get();
  device.copy(CopyDirection::TO_HOST, static_cast<int64_t>(self.element_size()), true);
  if (const auto answer = device.answer({"aten::_local_scalar_dense", {shape_of(self)}, {}})) {
    return answer->front().item();
  }
  return at::isFloatingType(self.scalar_type()) ? at::Scalar(1.0) : at::Scalar(1);
}

// -- which operators are kernels --------------------------------------------------------------------------------------------

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& each) {
    return each.alias_info() != nullptr && !each.alias_info()->isWrite();
  });
}

bool is_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.starts_with(kForeach) ||
      std::find(kFused.begin(), kFused.end(), name) != kFused.end();
}

} // namespace

bool is_virtual(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kVirtual;
}

TensorShape shape_of(const at::Tensor& tensor) {
  return {
      tensor.sizes().vec(),
      c10::toString(tensor.scalar_type()),
      static_cast<int64_t>(tensor.numel() * tensor.element_size()),
      tensor.is_non_overlapping_and_dense()};
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!is_virtual(tensor)) {
    return tensor;
  }
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

at::Tensor like(const at::Tensor& meta) {
  const auto options = at::TensorOptions().dtype(meta.scalar_type()).device(c10::Device(kVirtual, 0));
  return at::empty_strided(meta.sizes(), meta.strides(), options);
}

void register_operators() {
  constexpr auto key = c10::DispatchKey::PrivateUse1;
  // The libraries are never destroyed, because destroying one removes its registrations.
  auto& any = *new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  auto& aten = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  any.fallback(torch::CppFunction::makeFromBoxedFunction<&run_as_on_meta>());
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("as_strided", TORCH_FN(as_strided));
  aten.impl("view", TORCH_FN(view));
  aten.impl("_reshape_alias", TORCH_FN(reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("resize_", TORCH_FN(resize));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  aten.impl("copy_", TORCH_FN(copy));
  aten.impl("_copy_from", TORCH_FN(copy_from));
  aten.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  aten.impl("record_stream", TORCH_FN(record_stream));
  register_kernels(aten);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!name.name.starts_with("aten::") || !op || !op->hasSchema() || op->hasKernelForDispatchKey(key) ||
        is_view(op->schema()) || !is_kernel(*op)) {
      continue;
    }
    const std::string own = name.name.substr(std::string_view("aten::").size());
    const std::string full = name.overload_name.empty() ? own : own + "." + name.overload_name;
    aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_as_on_meta>());
  }
}

} // namespace memplug
