#include "comm/cuda/host_registration.h"

#include <cuda_runtime_api.h>

#include "core/text.h"

namespace ds::comm {

std::string register_host_memory(void* data, size_t bytes) {
  const cudaError_t error = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // else the next kernel launch reports it
  return cat("cudaHostRegister: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

void unregister_host_memory(void* data) {
  if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();
}

}  // namespace ds::comm
