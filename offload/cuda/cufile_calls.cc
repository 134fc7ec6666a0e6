// The functions of offload/device_file_calls.h by NVIDIA's cuFile, which is looked for when a file is opened: programs
// that do not use it need not have it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/types.h>

#include <cerrno>
#include <string>

#include "core/system_call.h"
#include "core/text.h"
#include "offload/device_file_calls.h"

namespace ds::offload {
namespace {

// These types are those of cufile.h, in all versions so far: the toolkit need not have the header.
struct CuFileError {
  int code;  // CUfileOpError; 0: none
  int cuda;  // CUresult, where the code says that it is CUDA's
};
struct CuFileDescription {
  int type;
  union {
    int descriptor;
    void* handle;
  } file;
  const void* operations;
};
constexpr int kLinuxDescriptor = 1;
constexpr int kFirstCode = 5000;
constexpr int kOfCuda = 5011;

struct CuFile {
  CuFileError (*driver_open)() = nullptr;
  CuFileError (*handle_register)(void** handle, CuFileDescription* description) = nullptr;
  void (*handle_deregister)(void* handle) = nullptr;
  ssize_t (*read)(void* handle, void* memory, size_t bytes, off_t offset, off_t memory_offset) = nullptr;
  std::string missing;  // why it cannot be used; empty: it can
};

// The errors of cufile.h that tell a user what to do.
std::string text_of(int code, int cuda) {
  switch (code) {
    case kFirstCode + 1:
      return "the driver nvidia-fs is not loaded, and cufile.json does not allow_compat_mode";
    case kFirstCode + 7:
      return "GPUDirect Storage does not run on this platform";
    case kFirstCode + 8:
      return "no GPUDirect Storage on this file system (`gdscheck -p` lists those that have it)";
    case kFirstCode + 9:
      return "no GPUDirect Storage into this GPU";
    case kOfCuda:
      return cat("an error of CUDA's driver", cuda == 0 ? std::string(" (see cufile.log)") : cat(": ", cuda));
    default:
      return cat("cuFile's error ", code);
  }
}

template <class Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = cat("libcufile.so.0 has no ", name);
}

CuFile load() {
  CuFile calls;
  void* const library = dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    calls.missing = cat("no library cuFile: ", why == nullptr ? "libcufile.so.0" : why);
    return calls;
  }
  find(library, "cuFileDriverOpen", calls.driver_open, calls.missing);
  find(library, "cuFileHandleRegister", calls.handle_register, calls.missing);
  find(library, "cuFileHandleDeregister", calls.handle_deregister, calls.missing);
  find(library, "cuFileRead", calls.read, calls.missing);
  if (!calls.missing.empty()) return calls;
  const CuFileError opened = calls.driver_open();
  if (opened.code != 0) calls.missing = text_of(opened.code, opened.cuda);
  return calls;
}

const CuFile& cufile() {
  static const CuFile kCalls = load();
  return kCalls;
}

void* open_file(int descriptor, std::string& reason) {
  reason = cufile().missing;
  if (!reason.empty()) return nullptr;
  CuFileDescription description{};
  description.type = kLinuxDescriptor;
  description.file.descriptor = descriptor;
  void* handle = nullptr;
  const CuFileError error = cufile().handle_register(&handle, &description);
  if (error.code == 0) return handle;
  reason = text_of(error.code, error.cuda);
  return nullptr;
}

void close_file(void* handle) { cufile().handle_deregister(handle); }

// cuFile works in the driver's current context. A thread that has not called CUDA has a current device, but no context
// until it sets that device, which guards leave out where it is the current one already.
cudaError_t bind_context() {
  int device = 0;
  const cudaError_t found = cudaGetDevice(&device);
  return found == cudaSuccess ? cudaSetDevice(device) : found;
}

int64_t read_file(void* handle, void* memory, int64_t bytes, int64_t offset, std::string& reason) {
  if (const cudaError_t bound = bind_context(); bound != cudaSuccess) {
    reason = cat("no context of CUDA: ", cudaGetErrorString(bound));
    return -1;
  }
  const ssize_t read = cufile().read(handle, memory, static_cast<size_t>(bytes), offset, 0);
  const int error = errno;
  if (read >= 0) return read;
  reason = read == -1 ? cat(SystemReason(error)) : text_of(static_cast<int>(-read), 0);
  return -1;
}

constexpr DeviceFileCalls kCuFileCalls{.open = open_file, .close = close_file, .read = read_file};
const bool kCuFileRegistered = (set_device_functions(&kCuFileCalls), true);

}  // namespace
}  // namespace ds::offload
