#include "comm/backends/cuda_plugin.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string_view>

#include "core/check.h"

namespace ds::comm {
namespace {

constexpr const char* kLibrary = "libdsengine_cuda.so";
constexpr const char* kLibraryVariable = "DS_CUDA_LIBRARY";

// The folder of the library that a function is in; empty where it is not known.
std::string folder_of_library(const void* function) {
  Dl_info info{};
  if (::dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

std::vector<std::string> places() {
  const char* const given = std::getenv(kLibraryVariable);
  if (given != nullptr && *given != '\0') return {given};
  return {cat(folder_of_library(reinterpret_cast<const void*>(&cuda_plugin)), "/", kLibrary), kLibrary};
}

// Opens a library; null with the reason where it cannot be. An installed one names no folder of LibTorch's: what it
// misses is found by opening libtorch_cuda.so first, the one beside the libtorch_cpu.so that is loaded.
void* open_library(const std::string& path, std::string& reason) {
  constexpr int kMode = RTLD_NOW | RTLD_LOCAL;
  void* library = ::dlopen(path.c_str(), kMode);
  if (library != nullptr) return library;
  reason = ::dlerror();
  const std::string torch_cuda =
      folder_of_library(reinterpret_cast<const void*>(&at::detail::getCUDAHooks)) + "/libtorch_cuda.so";
  std::error_code ignored;
  if (reason.starts_with(path + ":") || !std::filesystem::exists(torch_cuda, ignored)) return nullptr;
  if (::dlopen(torch_cuda.c_str(), kMode) != nullptr) library = ::dlopen(path.c_str(), kMode);
  if (library == nullptr) reason = ::dlerror();
  return library;
}

// An NVIDIA GPU of Linux, or of Linux under Windows.
bool may_have_gpu() {
  std::error_code ignored;
  return std::filesystem::exists("/dev/nvidiactl", ignored) || std::filesystem::exists("/dev/dxg", ignored);
}

}  // namespace

bool shows_no_gpu(const char* cuda_visible_devices) {
  if (cuda_visible_devices == nullptr) return false;
  const std::string_view all = cuda_visible_devices;
  const std::string_view first = all.substr(0, all.find(','));
  const size_t begin = first.find_first_not_of(' ');
  return begin == std::string_view::npos || first.substr(begin, first.find_last_not_of(' ') + 1 - begin) == "-1";
}

bool expects_gpu() {
  if (shows_no_gpu(std::getenv("CUDA_VISIBLE_DEVICES"))) return false;
  const char* const given = std::getenv(kLibraryVariable);
  if (given == nullptr || *given == '\0') return may_have_gpu();
  return std::string_view(given) != "none";
}

namespace {

// Note [A CUDA library that comes too late]
// LibTorch looks for its CUDA half once: at the first torch::manual_seed(), torch::cuda::is_available() or is_pinned();
// and autograd counts devices at the first backward. A program may do all of that before it names a device, so the
// library is opened with this one, before main(). What goes wrong here is said when the device is asked for.
__attribute__((constructor)) void open_at_start() {
  const char* const given = std::getenv(kLibraryVariable);
  const bool named = given != nullptr && *given != '\0';
  if (!named && (shows_no_gpu(std::getenv("CUDA_VISIBLE_DEVICES")) || !may_have_gpu())) return;
  try {
    cuda_plugin();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): said when the device is asked for
  }
}

}  // namespace

const CudaPlugin* open_cuda_plugin(const std::vector<std::string>& paths) {
  std::string reasons;
  void* library = nullptr;
  for (const std::string& path : paths) {
    std::string reason;
    library = open_library(path, reason);
    if (library != nullptr) break;
    reasons += cat(reasons.empty() ? "" : "; ", reason);
  }
  require<ConfigError>(
      library != nullptr, "device cuda needs ", kLibrary, ", which cannot be loaded (", reasons,
      "). Build it on a machine with a CUDA toolkit: cmake --preset cuda && cmake --build --preset cuda, ",
      "with a LibTorch that holds libtorch_cuda.so and the NVIDIA libraries it names; or run on the CPU");
  using Entry = const CudaPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(::dlsym(library, CudaPlugin::kSymbol));
  const CudaPlugin* plugin = entry == nullptr ? nullptr : entry();
  require<ConfigError>(plugin != nullptr && plugin->version == CudaPlugin::kVersion, kLibrary, ": expected version ",
                       CudaPlugin::kVersion, ", found ", plugin == nullptr ? 0 : plugin->version,
                       ". Build both libraries from one source tree");
  return plugin;
}

const CudaPlugin& cuda_plugin() {
  static const CudaPlugin* const kPlugin = open_cuda_plugin(places());
  static const bool kSeen = at::detail::getCUDAHooks().isBuilt();
  require<ConfigError>(kSeen, "device cuda: LibTorch looked for its CUDA library before ", kLibrary,
                       " was loaded, and finds it no more in this process. torch::manual_seed(), ",
                       "torch::cuda::is_available(), is_pinned() and backward() come after ",
                       "ds::engine::init_distributed() or initialize(): move them; or start the program with ",
                       kLibraryVariable, " set to the path of ", kLibrary, ", which is then loaded before main()");
  return *kPlugin;
}

}  // namespace ds::comm
