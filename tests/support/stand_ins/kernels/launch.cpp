#include "launch.h"

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <dlfcn.h>

#ifdef MEMPLUG_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace stand_ins {
namespace {

// The same as in tests/cudasim/runtime/cudasim.h, which needs CUDA's headers.
struct Range {
  uintptr_t begin, end;
  bool write;
};
using Enqueue = bool (*)(void* stream, const char* name, std::function<void()>* run, std::vector<Range>* ranges);

void add_range(std::vector<Range>& ranges, const Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return;
  }
  uint64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += static_cast<uint64_t>((tensor.size(d) - 1) * tensor.stride(d));
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  ranges.push_back({begin, begin + (last + 1) * tensor.element_size(), write});
}

template <typename T>
void widen(const Elements& of, Floats& values) {
  const T* source = static_cast<const T*>(of.data);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(source[i]);
  }
}

template <typename T>
void narrow(const Elements& of, const Floats& values) {
  T* target = static_cast<T*>(of.data);
  for (size_t i = 0; i < values.size(); ++i) {
    target[i] = static_cast<T>(values[i]);
  }
}

void rescale(const Elements& of, Floats& values) {
  // blocks lie along the rows of the stored matrix
  const int64_t columns = of.transposed ? of.rows : of.columns;
  const int64_t blocks = of.block == 0 ? 0 : (columns + of.block - 1) / of.block;
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    values[i] *= of.block == 0 ? *of.scale_inv : of.scale_inv[i / columns * blocks + i % columns / of.block];
  }
}

} // namespace

void launch(const char* name, std::initializer_list<Tensor> reads, std::initializer_list<Tensor> writes,
            std::function<void()> work) {
  const Tensor& first = *writes.begin();
  if (first.is_cpu()) {
    work();
    return;
  }
#ifdef MEMPLUG_CUDA
  static const auto enqueue = reinterpret_cast<Enqueue>(dlsym(RTLD_DEFAULT, "cudasim_enqueue"));
  TORCH_CHECK(first.is_cuda() && enqueue, name, ": a stand-in's kernels run on the CPU and on simulated CUDA alone");
  std::vector<Range> ranges;
  for (const Tensor& tensor : reads) {
    add_range(ranges, tensor, false);
  }
  for (const Tensor& tensor : writes) {
    add_range(ranges, tensor, true);
  }
  enqueue(c10::cuda::getCurrentCUDAStream(first.device().index()).stream(), name, &work, &ranges);
#else
  TORCH_CHECK(false, name, ": a stand-in's kernels run on the CPU and on simulated CUDA alone, not on ", first.device());
#endif
}

Floats Elements::read() const {
  Floats values(static_cast<size_t>(rows * columns));
  switch (type) {
  case at::kFloat:
    std::copy_n(static_cast<const float*>(data), values.size(), values.data());
    break;
  case at::kBFloat16:
    widen<c10::BFloat16>(*this, values);
    break;
  case at::kHalf:
    widen<c10::Half>(*this, values);
    break;
  case at::kFloat8_e4m3fn:
    widen<c10::Float8_e4m3fn>(*this, values);
    break;
  default:
    widen<c10::Float8_e5m2>(*this, values);
  }
  if (scale_inv) {
    rescale(*this, values);
  }
  if (!transposed) {
    return values;
  }
  Floats turned(values.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      turned[i * columns + j] = values[j * rows + i];
    }
  }
  return turned;
}

void Elements::write(const Floats& values) const {
  switch (type) {
  case at::kFloat:
    std::copy_n(values.data(), values.size(), static_cast<float*>(data));
    break;
  case at::kBFloat16:
    narrow<c10::BFloat16>(*this, values);
    break;
  case at::kHalf:
    narrow<c10::Half>(*this, values);
    break;
  case at::kFloat8_e4m3fn:
    narrow<c10::Float8_e4m3fn>(*this, values);
    break;
  default:
    narrow<c10::Float8_e5m2>(*this, values);
  }
}

Elements elements(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kFloat8_e4m3fn ||
                  type == at::kFloat8_e5m2,
              "a stand-in's kernel does not take ", type);
  check_contiguous(tensor, "a kernel's operand");
  const int64_t columns = tensor.dim() > 0 ? tensor.size(-1) : 1;
  return {tensor.data_ptr(), type, columns ? tensor.numel() / columns : 0, columns};
}

} // namespace stand_ins
