// A kernel of a stand-in: it allocates by torch's allocator, and computes on addresses, unseen by the dispatcher.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <vector>

namespace stand_ins {

using at::Tensor;
using Floats = std::vector<float>;

// Runs `work` at once on the CPU. On simulated CUDA (tests/cudasim) queues `work` on the current stream, and names the
// bytes that it reads and writes. `name` must live as long as the process. Raises on a real GPU, where these kernels
// cannot run.
void launch(const char* name, std::initializer_list<Tensor> reads, std::initializer_list<Tensor> writes,
            std::function<void()> work);

// Elements at an address, row by row: float, bfloat16, half, or eight bits with a scale.
struct Elements {
  void* data = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t rows = 0, columns = 0;
  const float* scale_inv = nullptr; // factors of eight-bit elements
  int64_t block = 0;                // number of a row's elements that share a factor; 0: all elements share one
  bool transposed = false;          // eight-bit elements lie column after column

  Floats read() const;
  void write(const Floats& values) const;
};

// Returns a tensor's elements as a matrix: a row is one slice along the last dimension.
Elements elements(const Tensor& tensor);

inline void check_contiguous(const Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.is_contiguous(), what, " is not contiguous");
}

} // namespace stand_ins
