// Allocation and registration. Freed memory is unmapped, so that code that still uses it crashes.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>

#include "races.h"
#include "scheduler.h"

namespace cudasim {
namespace {

size_t rounded(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

void* mapped(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Unmaps a piece of memory, after waiting for all tasks of the device, as CUDA does.
void unmap(std::map<uintptr_t, size_t>& pieces, std::map<uintptr_t, size_t>::iterator piece) {
  ++state().blocked;
  wait_for_all();
  forget(piece->first, piece->first + piece->second);
  munmap(reinterpret_cast<void*>(piece->first), piece->second);
  pieces.erase(piece);
}

} // namespace

bool lies_in(const std::map<uintptr_t, size_t>& pieces, const void* pointer, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  auto it = pieces.upper_bound(at);
  if (it == pieces.begin()) {
    return false;
  }
  --it;
  uintptr_t end = it->first + it->second;
  if (at >= end) {
    return false;
  }
  for (++it; end < at + bytes && it != pieces.end() && it->first == end; ++it) { // as in expandable segments
    end += it->second;
  }
  return at + bytes <= end;
}

} // namespace cudasim

using namespace cudasim;

CUDASIM_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(state().mutex);
  *total = settings().memory_bytes;
  *free = *total - std::min(*total, state().used_bytes);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const Lock lock(state().mutex);
  State& s = state();
  const size_t size = rounded(bytes);
  *pointer = s.used_bytes + size > settings().memory_bytes ? nullptr : mapped(size);
  if (*pointer == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  if (settings().poison) {
    std::memset(*pointer, 0xFF, size);
  }
  s.used_bytes += size;
  s.device[reinterpret_cast<uintptr_t>(*pointer)] = size;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const Lock lock(state().mutex);
  State& s = state();
  const auto found = s.device.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == s.device.end()) {
    violation("cudaFree of what cudaMalloc did not give");
    return fail(cudaErrorInvalidValue);
  }
  s.used_bytes -= found->second;
  unmap(s.device, found);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  const Lock lock(state().mutex);
  State& s = state();
  const size_t size = rounded(bytes);
  *pointer = s.pinned_bytes + size > settings().pinned_bytes ? nullptr : mapped(size);
  if (*pointer == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  s.pinned[reinterpret_cast<uintptr_t>(*pointer)] = size;
  s.pinned_bytes += size;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

CUDASIM_API cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const Lock lock(state().mutex);
  State& s = state();
  const auto found = s.pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == s.pinned.end() || s.registered.count(found->first) > 0) {
    return fail(cudaErrorInvalidValue);
  }
  s.pinned_bytes -= found->second;
  unmap(s.pinned, found);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  const Lock lock(state().mutex);
  State& s = state();
  if (settings().refuses_to_register || s.pinned_bytes + bytes > settings().pinned_bytes) {
    return fail(cudaErrorMemoryAllocation);
  }
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  const auto next = s.pinned.upper_bound(begin);
  if ((next != s.pinned.end() && next->first < begin + bytes) || lies_in(s.pinned, pointer)) {
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  s.pinned[begin] = bytes;
  s.registered.insert(begin);
  s.pinned_bytes += bytes;
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock(state().mutex);
  State& s = state();
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (s.registered.erase(begin) == 0) {
    return fail(cudaErrorHostMemoryNotRegistered);
  }
  const size_t bytes = s.pinned[begin];
  check_unused(begin, begin + bytes, "cudaHostUnregister");
  forget(begin, begin + bytes);
  s.pinned_bytes -= bytes;
  s.pinned.erase(begin);
  return cudaSuccess;
}

CUDASIM_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(state().mutex);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->device = -2; // unregistered
  if (lies_in(state().device, pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = 0;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (lies_in(state().pinned, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = 0;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

CUDASIM_API void cudasim_set_memory(size_t bytes) { // so that a test chooses when memory runs out
  const Lock lock(state().mutex);
  settings().memory_bytes = bytes;
}
CUDASIM_API void cudasim_set_pinned(size_t bytes) {
  const Lock lock(state().mutex);
  settings().pinned_bytes = bytes;
}
CUDASIM_API size_t cudasim_memory_used() {
  return state().used_bytes;
}
CUDASIM_API size_t cudasim_registered() {
  const Lock lock(state().mutex);
  return state().registered.size();
}
CUDASIM_API int cudasim_is_device(const void* pointer, size_t bytes) {
  const Lock lock(state().mutex);
  return lies_in(state().device, pointer, bytes) ? 1 : 0;
}

#define UNSUPPORTED(NAME, ...)            \
  CUDASIM_API cudaError_t NAME(__VA_ARGS__) { \
    return fail(cudaErrorNotSupported);   \
  }
UNSUPPORTED(cudaMallocAsync, void**, size_t, cudaStream_t)
UNSUPPORTED(cudaFreeAsync, void*, cudaStream_t)
UNSUPPORTED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
UNSUPPORTED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
UNSUPPORTED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
UNSUPPORTED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
UNSUPPORTED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
UNSUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
UNSUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
UNSUPPORTED(cudaIpcCloseMemHandle, void*)
UNSUPPORTED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
UNSUPPORTED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
