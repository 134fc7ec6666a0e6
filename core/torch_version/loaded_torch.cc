#include "core/torch_version/loaded_torch.h"

#include <caffe2/core/common.h>

#include "core/check.h"

namespace ds {
namespace {

// "2.11" of "2.11.0", "2.11.0a0+git70d99e9" and "2.11".
std::string_view minor_of(std::string_view version) {
  const size_t dot = version.find('.');
  return dot == std::string_view::npos ? version : version.substr(0, version.find_first_not_of("0123456789", dot + 1));
}

}  // namespace

std::string loaded_torch_version() {
  // Not at::show_config(): it makes LibTorch look for its CUDA half, for good (comm/backends/cuda_plugin.cc).
  const auto& options = caffe2::GetBuildOptions();
  const auto found = options.find("TORCH_VERSION");
  return found == options.end() ? std::string() : found->second;
}

void require_same_torch_minor(std::string_view compiled_for, std::string_view loaded) {
  const std::string_view wanted = minor_of(compiled_for);
  require<ConfigError>(
      loaded.empty() || minor_of(loaded) == wanted, "libdsengine was compiled for LibTorch ", wanted,
      ", and this process has loaded LibTorch ", loaded,
      ": C++ programs do not survive a change of its minor version. Start the program with a LibTorch ", wanted,
      " (its rpath, or LD_LIBRARY_PATH), or build or install dsengine for LibTorch ", minor_of(loaded));
}

}  // namespace ds
