// The calls of the driver that c10 makes: contexts, and virtual memory for expandable segments.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "races.h"
#include "state.h"

namespace cudasim {
namespace {

const size_t GRANULARITY_BYTES = 2 << 20;

struct Physical { // memory without an address
  int file = -1;
  size_t bytes = 0;
  int references = 1;
};

std::map<uintptr_t, Physical*>& mappings() {
  static auto* instance = new std::map<uintptr_t, Physical*>();
  return *instance;
}

void release(Physical* physical) {
  if (--physical->references == 0) {
    state().used_bytes -= physical->bytes;
    close(physical->file);
    delete physical;
  }
}

void* reserved(void* at, size_t bytes, int flags) { // addresses without memory
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

CUresult unknown_call() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

} // namespace
} // namespace cudasim

using namespace cudasim;

CUDASIM_API CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* memory = reserved(nullptr, bytes, 0);
  *pointer = reinterpret_cast<CUdeviceptr>(memory);
  return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  munmap(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                                 unsigned long long) {
  const Lock lock(state().mutex);
  if (state().used_bytes + bytes > settings().memory_bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const int file = memfd_create("cudasim", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  state().used_bytes += bytes;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{file, bytes, 1});
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Lock lock(state().mutex);
  release(reinterpret_cast<Physical*>(handle));
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                              unsigned long long) {
  const Lock lock(state().mutex);
  auto* physical = reinterpret_cast<Physical*>(handle);
  void* memory = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      physical->file, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (settings().poison) {
    std::memset(memory, 0xFF, bytes);
  }
  ++physical->references;
  mappings()[at] = physical;
  state().device[at] = bytes;
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  const Lock lock(state().mutex);
  check_unused(at, at + bytes, "cuMemUnmap");
  forget(at, at + bytes);
  (void)reserved(reinterpret_cast<void*>(at), bytes, MAP_FIXED);
  const auto found = mappings().find(at);
  if (found != mappings().end()) {
    release(found->second);
    mappings().erase(found);
  }
  state().device.erase(at);
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                   CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY_BYTES;
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the simulated driver";
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 1 : 0;
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUDASIM_API CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}

CUDASIM_API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                         unsigned long long, cudaDriverEntryPointQueryResult* status) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&unknown_call), &here);
  void* self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  void* found = self != nullptr ? dlsym(self, symbol) : nullptr;
  *function = found != nullptr ? found : reinterpret_cast<void*>(&unknown_call);
  if (status != nullptr) {
    *status = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
