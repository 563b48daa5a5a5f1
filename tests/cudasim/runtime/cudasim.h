// Calls that the simulated CUDA runtime adds to CUDA's: for the operators, and for Python, which calls them by ctypes.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#define CUDASIM_API extern "C" __attribute__((visibility("default")))

namespace cudasim {

// Bytes [begin, end) that a task reads or writes; conflicting tasks are checked for order.
struct Range {
  uintptr_t begin, end;
  bool write;
};

using Ranges = std::vector<Range>;

} // namespace cudasim

// Queues `run` on a stream, as launching a kernel does. `name` must live as long as the process. Under Races::RAISE
// returns false if the task conflicts with an earlier task and is not ordered after it; queues the task all the same.
CUDASIM_API bool cudasim_enqueue(cudaStream_t stream, const char* name, std::function<void()>* run,
                                 cudasim::Ranges* ranges);
