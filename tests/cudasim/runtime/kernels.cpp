// There are no kernels: the code in ../operators replaces the operators that launch them. Any other launch ends the
// process with the kernel's name, since the kernel's results would be missing.
#include <cstdio>
#include <cstdlib>

#include "scheduler.h"

namespace cudasim {
namespace {

const double SLEEP_S = 1e-3;

thread_local cudaStream_t launch_stream = nullptr; // set from <<<>>> to the launch

cudaError_t launched(const void* kernel, cudaStream_t stream) {
  const Lock lock(state().mutex);
  const auto found = state().kernels.find(kernel);
  const std::string name = found != state().kernels.end() ? found->second : "(unknown)";
  if (name.find("spin_kernel") != std::string::npos) { // torch.cuda._sleep
    return run_on(*stream_of(stream), "sleep", SLEEP_S, {}, [] {});
  }
  std::fprintf(stderr, "cudasim: a kernel that is not simulated was launched: %s\n", name.c_str());
  std::abort();
}

} // namespace
} // namespace cudasim

using namespace cudasim;

CUDASIM_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
CUDASIM_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDASIM_API void __cudaUnregisterFatBinary(void**) {}
CUDASIM_API char __cudaInitModule(void**) {
  return 1;
}
CUDASIM_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                        dim3*, int*) {
  const Lock lock(state().mutex);
  state().kernels.emplace(host, name);
}
CUDASIM_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
CUDASIM_API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void* stream) {
  launch_stream = static_cast<cudaStream_t>(stream);
  return 0;
}
CUDASIM_API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void* stream) {
  *static_cast<cudaStream_t*>(stream) = launch_stream;
  return cudaSuccess;
}
CUDASIM_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
CUDASIM_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(kernel, stream);
}
CUDASIM_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launched(function, stream);
}
CUDASIM_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launched(function, config->stream);
}
CUDASIM_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                                    cudaStream_t stream) {
  return launched(function, stream);
}
CUDASIM_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = settings().capability;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGetSymbolAddress(void**, const void*) {
  return fail(cudaErrorNotSupported);
}
CUDASIM_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return fail(cudaErrorNotSupported);
}
CUDASIM_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                              unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
