// The kernel of every operator: allocates results by torch's own CUDA allocator, and queues the CPU's kernel. If a
// result's shape depends on the data, the call waits for the stream, as on CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "../runtime/settings.h"
#include "operators.h"

namespace cudasim {

at::Generator Draw::generator() const {
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

namespace {

const double MOST_FLOPS = 2e11; // a matmul with more FLOPs would take minutes here

// Returns a CPU tensor over the same memory, or a copy if the tensor is a CPU tensor already.
Tensor to_cpu(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "cudasim: only dense tensors are simulated");
  Tensor made = tensor.is_cuda() ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                                 at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
                                 : tensor.clone();
  if (tensor.is_cuda()) {
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
  }
  set_wrapped_as(made, tensor);
  return made;
}

Tensor to_cuda(const Tensor& of) {
  return Tensor(at::detail::empty_strided_cuda(of.sizes(), of.strides(), of.scalar_type(), c10::Device(at::kCUDA)));
}

void add_range(Ranges& ranges, const Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) {
    return;
  }
  uint64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += static_cast<uint64_t>((tensor.size(d) - 1) * tensor.stride(d));
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  ranges.push_back({begin, begin + (last + 1) * tensor.element_size(), write});
}

void on_device(const std::function<void()>& run, const std::string& name) {
  thread_local const bool once = [] {
    at::set_num_threads(static_cast<int>(number_of("CUDASIM_THREADS", 1)));
    return true;
  }();
  (void)once;
  const Quiet quiet;
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cudasim: %s failed on the device: %s\n", name.c_str(), error.what());
    std::abort();
  }
}

// `name` must live as long as the process.
void queue(const std::string& name, std::function<void()> run, Ranges ranges) {
  std::function<void()> task = [&name, run = std::move(run)] { on_device(run, name); };
  cudasim_enqueue(c10::cuda::getCurrentCUDAStream().stream(), name.c_str(), &task, &ranges);
  C10_CUDA_CHECK(cudaGetLastError()); // as torch does after each launch
}

void copy_results(const Stack& from, const Stack& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].isTensor() && to[i].toTensor().defined() && from[i].isTensor() && from[i].toTensor().defined()) {
      const Tensor &source = from[i].toTensor(), target = to[i].toTensor();
      if (target.data_ptr() != source.data_ptr()) {
        TORCH_CHECK(target.sizes() == source.sizes(), "result ", i, " has sizes ", source.sizes(), ", not ",
                    target.sizes());
        target.copy_(source);
      }
    } else if (to[i].isTensorList()) {
      const auto sources = from[i].toTensorVector(), targets = to[i].toTensorVector();
      for (size_t j = 0; j < targets.size(); ++j) {
        copy_results({sources[j]}, {targets[j]});
      }
    }
  }
}

// Returns whether a matmul is too large to run here, as a benchmark's are: its result is then 0, and a message says so.
bool is_too_large(const c10::OperatorHandle& op, const Stack& arguments) {
  const std::string& name = op.operator_name().name;
  return (name == "aten::mm" || name == "aten::bmm") &&
      2.0 * static_cast<double>(arguments[0].toTensor().numel()) *
          static_cast<double>(arguments[1].toTensor().size(-1)) > MOST_FLOPS;
}

Stack compute_by_cpu(const c10::OperatorHandle& op, Stack arguments, Draw) {
  if (is_too_large(op, arguments)) {
    std::fprintf(stderr, "cudasim: %s is too large, and left out\n", op.operator_name().name.c_str());
    if (arguments.size() > 2) {
      return {arguments[2].toTensor().zero_()};
    }
    auto sizes = arguments[0].toTensor().sizes().vec();
    sizes.back() = arguments[1].toTensor().size(-1);
    return {at::zeros(sizes, arguments[0].toTensor().options())};
  }
  op.callBoxed(&arguments);
  return arguments;
}

Draw draw(const Info& info, const Stack& arguments) {
  if (!info.draws || (info.dropout >= 0 && arguments[info.dropout].toDouble() <= 0)) {
    return {};
  }
  int64_t most = 1;
  for (const IValue& argument : arguments) {
    visit(argument, [&](const Tensor& each) { most = std::max(most, each.numel()); });
  }
  std::optional<at::Generator> given;
  if (info.generator >= 0 && arguments[info.generator].isGenerator()) {
    given = arguments[info.generator].toGenerator();
  }
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  const auto [seed, offset] = generator->philox_engine_inputs(4 * (1 + static_cast<uint64_t>(most) / 100000));
  return {seed, offset};
}

void resize(const Tensor& out, const Tensor& as) {
  if (out.sizes() != as.sizes()) {
    at::native::resize_output(out, as.sizes());
  }
}

// One call of an operator.
struct Call {
  const c10::OperatorHandle& op;
  const Info& info;
  const Stack& arguments;
  Draw drawn;
  Stack given; // arguments for the CPU's kernel
  Ranges ranges;

  void give(bool known) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (info.out[i] && !known) {
        given.push_back(
            map(arguments[i], [](const Tensor& each) { return at::empty({0}, each.options().device(at::kCPU)); }));
      } else if (arguments[i].isDevice()) {
        given.push_back(c10::Device(at::kCPU));
      } else if (static_cast<int>(i) == info.generator) {
        given.push_back(drawn.generator());
      } else {
        given.push_back(map(arguments[i], to_cpu));
        visit(arguments[i], [&](const Tensor& each) { add_range(ranges, each, info.written[i]); });
      }
    }
  }

  Compute compute() const {
    return info.compute ? info.compute : compute_by_cpu;
  }

  Stack queue_with(const Stack& metas) {
    Stack results, targets;
    for (size_t r = 0; r < info.alias.size(); ++r) {
      const bool is_new = info.alias[r] < 0;
      results.push_back(is_new ? map(metas[r], to_cuda) : arguments[info.alias[r]]);
      targets.push_back(is_new ? map(results.back(), to_cpu) : IValue());
      if (is_new) {
        visit(results.back(), [&](const Tensor& each) { add_range(ranges, each, true); });
      }
    }
    queue(
        info.name,
        [op = op, compute = compute(), drawn = drawn, given = std::move(given), targets = std::move(targets)] {
          copy_results(compute(op, given, drawn), targets);
        },
        std::move(ranges));
    return results;
  }

  Stack wait_and_see() {
    const auto computed = std::make_shared<Stack>();
    const auto error = std::make_shared<std::exception_ptr>();
    queue(
        info.name,
        [op = op, compute = compute(), drawn = drawn, given = std::move(given), computed, error] {
          try {
            *computed = compute(op, given, drawn);
          } catch (...) {
            *error = std::current_exception();
          }
        },
        std::move(ranges));
    C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
    if (*error) {
      std::rethrow_exception(*error);
    }
    Stack results;
    for (size_t r = 0; r < computed->size(); ++r) {
      const int alias = info.alias[r];
      if (alias >= 0 && info.out[alias] && arguments[alias].isTensor()) {
        resize(arguments[alias].toTensor(), (*computed)[r].toTensor());
      }
      results.push_back(alias >= 0 ? arguments[alias] : map((*computed)[r], to_cuda));
      if (alias < 0 || info.out[alias]) {
        Ranges written;
        visit(results.back(), [&](const Tensor& each) { add_range(written, each, true); });
        const Stack targets{map(results.back(), to_cpu)};
        queue(info.name, [computed, r, targets] { copy_results({(*computed)[r]}, targets); }, std::move(written));
      }
    }
    return results;
  }
};

} // namespace

void call(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Quiet quiet;
  const Info& info = info_of(op);
  const auto count = static_cast<ptrdiff_t>(op.schema().arguments().size());
  const Stack arguments(stack->end() - count, stack->end());
  stack->resize(stack->size() - arguments.size());

  Stack metas;
  const bool known = info.only_in_place || infer(op, info, arguments, metas);
  if (known && !info.only_in_place) {
    for (size_t r = 0; r < info.alias.size(); ++r) {
      const int alias = info.alias[r];
      if (alias >= 0 && info.out[alias] && arguments[alias].isTensor()) {
        resize(arguments[alias].toTensor(), metas[r].toTensor());
      }
    }
  }
  Call one{op, info, arguments, draw(info, arguments), {}, {}};
  one.give(known);
  const Stack results = known ? one.queue_with(metas) : one.wait_and_see();
  stack->insert(stack->end(), results.begin(), results.end());
}

// Copies across the link by torch's own code, with cudaMemcpyAsync; a copy on the device is a kernel.
void call_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor self = (*stack)[stack->size() - 3].toTensor(), source = (*stack)[stack->size() - 2].toTensor();
  if (self.is_cuda() && source.is_cuda()) {
    call(op, keys, stack);
    return;
  }
  const bool non_blocking = stack->back().toBool();
  stack->resize(stack->size() - 3);
  Tensor target = self;
  at::native::copy_(target, source, non_blocking);
  stack->push_back(self);
}

} // namespace cudasim
