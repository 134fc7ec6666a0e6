// Stands in for the driver's libnvidia-ml: three GPUs, 0 and 1 joined by NVLink, 2 behind another host bridge.
#include <cstdint>
#include <cstring>

namespace {

int devices[3];

long index_of(const void* device) { return static_cast<const int*>(device) - devices; }

}  // namespace

extern "C" {

struct FakeMemory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int /*result*/) { return "fake error"; }

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  std::strncpy(text, "580.65.06", length);
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13010;
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 3;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &devices[index];
  return 0;
}

int nvmlDeviceGetName(void* device, char* text, unsigned length) {
  std::strncpy(text, index_of(device) == 2 ? "Fake GPU with less" : "Fake GPU", length);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, FakeMemory* memory) {
  memory->total = index_of(device) == 2 ? 1ULL << 30 : 2ULL << 30;
  memory->free = 1ULL << 29;
  memory->used = memory->total - memory->free;
  return 0;
}

int nvmlDeviceGetP2PStatus(void* one, void* other, int /*capability*/, unsigned* status) {
  *status = index_of(one) == 2 || index_of(other) == 2 ? 3 : 0;
  return 0;
}

int nvmlDeviceGetTopologyCommonAncestor(void* /*one*/, void* /*other*/, int* level) {
  *level = 50;
  return 0;
}

}  // extern "C"
