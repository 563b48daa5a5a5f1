// The one device and its properties. When torch first counts devices, the operators are loaded.
//
// Each process has a device of its own. If a launcher has started several processes on this machine, the device answers
// to as many ordinals, so that a script can take the ordinal of its local rank.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

namespace cudasim {
namespace {

const int CUDA_VERSION_OF_TORCH = 13000;

thread_local int ordinal_of_thread = 0;

int ordinals() {
  return std::max(1, static_cast<int>(number_of("LOCAL_WORLD_SIZE", 1)));
}

// Loads a library from this library's folder.
void load(const char* name) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&load), &here);
  const std::string path(here.dli_fname);
  if (dlopen((path.substr(0, path.rfind('/') + 1) + name).c_str(), RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "cudasim: %s is missing: %s\n", name, dlerror());
    std::abort();
  }
}

void load_all() {
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD) != nullptr) {
    load("libnvidia-ml.so.1");
    load("libcudasim_operators.so");
  }
}

cudaDeviceProp properties() {
  cudaDeviceProp p;
  std::memset(&p, 0, sizeof p);
  std::strcpy(p.name, "Simulated");
  p.totalGlobalMem = settings().memory_bytes;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.major = settings().capability / 10;
  p.minor = settings().capability % 10;
  p.multiProcessorCount = 132;
  p.l2CacheSize = 50 << 20;
  p.textureAlignment = 512;
  p.unifiedAddressing = p.concurrentKernels = p.canMapHostMemory = p.hostRegisterSupported = 1;
  p.asyncEngineCount = 3;
  return p;
}

} // namespace
} // namespace cudasim

using namespace cudasim;

CUDASIM_API cudaError_t cudaGetDeviceCount(int* count) {
  static std::once_flag once;
  std::call_once(once, load_all);
  *count = ordinals();
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGetDevice(int* device) {
  *device = ordinal_of_thread;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= ordinals()) {
    return fail(cudaErrorInvalidDevice);
  }
  ordinal_of_thread = device;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_OF_TORCH;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION_OF_TORCH;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = properties();
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const cudaDeviceProp p = properties();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::snprintf(text, static_cast<size_t>(size), "0000:00:00.0");
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return fail(cudaErrorNotSupported);
}
CUDASIM_API cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
CUDASIM_API cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// Runs all queued tasks of a stream, as if time had passed. The host has not seen them run, so this orders nothing.
CUDASIM_API void cudasim_run(cudaStream_t stream) {
  const Lock lock(state().mutex);
  finish(*stream_of(stream));
}
