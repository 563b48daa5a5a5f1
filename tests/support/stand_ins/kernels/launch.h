// A kernel of a stand-in: it allocates by torch's allocator, and computes on addresses, which no dispatcher sees.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <vector>

namespace stand_ins {

using at::Tensor;
using Floats = std::vector<float>;

// Runs `work` on the CPU at once; on simulated CUDA (tests/cudasim) it queues it on the current stream, with the bytes
// that it reads and writes. `name` lives as long as the process. On a real GPU it raises: these kernels are the CPU's.
void launch(const char* name, std::initializer_list<Tensor> reads, std::initializer_list<Tensor> writes,
            std::function<void()> work);

// Elements at an address: of float, bfloat16, half, or of eight bits with a scale, all row after row.
struct Elements {
  void* data = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t rows = 0, columns = 0;
  const float* scale_inv = nullptr; // of eight-bit elements: what each is multiplied by,
  int64_t block = 0;                // the same for so many in a row; 0: for all
  bool transposed = false;          // eight-bit elements lie column after column

  Floats read() const;
  void write(const Floats& values) const;
};

// Of a tensor, as a matrix of its last dimension's rows.
Elements elements(const Tensor& tensor);

inline void check_contiguous(const Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.is_contiguous(), what, " is not contiguous");
}

} // namespace stand_ins
