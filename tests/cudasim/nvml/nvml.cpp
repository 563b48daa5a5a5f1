// The calls of NVIDIA's management library that c10 makes before it maps expandable segments. They report one device,
// without fabric or NVLink.
#define NVML_API extern "C" __attribute__((visibility("default")))

namespace {
const int SUCCESS = 0, NOT_SUPPORTED = 3;
} // namespace

NVML_API int nvmlInit_v2() {
  return SUCCESS;
}
NVML_API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return SUCCESS;
}
NVML_API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { // the caller's struct says "not supported" by default
  return SUCCESS;
}
NVML_API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) {
  return NOT_SUPPORTED;
}
NVML_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) {
  return NOT_SUPPORTED;
}
NVML_API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}
NVML_API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}
