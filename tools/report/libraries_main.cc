// ds-tool-libraries: what LibTorch and the CUDA parts say of themselves, as one JSON object, for `ds-tool report`. A
// program of its own because it loads both; backends are tried, not looked up.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "comm/backends/cuda_plugin.h"
#include "comm/gloo/gloo_backend.h"
#include "comm/shared_memory/shared_region.h"
#include "core/check.h"

namespace {

using nlohmann::ordered_json;

constexpr size_t kTriedBytes = 1 << 20;

std::string file_of(const void* symbol) {
  Dl_info info{};
  return ::dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

ordered_json describe_libtorch() {
  return {{"version", TORCH_VERSION},
          {"cpu_capability", at::get_cpu_capability()},
          {"threads", at::get_num_threads()},
          {"file", file_of(reinterpret_cast<const void*>(&at::get_cpu_capability))}};
}

// {"works": true}, or why not.
template <class Try>
ordered_json tried(Try attempt) {
  try {
    attempt();
    return {{"works", true}};
  } catch (const std::exception& error) {
    return {{"works", false}, {"refusal", error.what()}};
  }
}

// A group of one: opens the interface that GLOO_SOCKET_IFNAME names, or the loopback.
void try_gloo() { ds::comm::connect_gloo(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.address = "127.0.0.1"}); }

void try_shared_memory() {
  const std::string name = ds::cat("/dsengine-report-", ::getpid());
  const auto region = ds::comm::SharedRegion::create(name, kTriedBytes);
  ds::comm::SharedRegion::remove_name(name);
}

int usable_devices() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() : 0;
}

// The version of the NCCL that LibTorch has loaded by now; empty: none.
std::string nccl_version() {
  void* const nccl = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (nccl == nullptr) return "";
  using GetVersion = int (*)(int*);
  const auto get = reinterpret_cast<GetVersion>(::dlsym(nccl, "ncclGetVersion"));
  int version = 0;  // 22809 is 2.28.9
  const bool told = get != nullptr && get(&version) == 0;
  ::dlclose(nccl);
  return told ? ds::cat(version / 10000, ".", version / 100 % 100, ".", version % 100) : "";
}

ordered_json describe_cuda() {
  try {
    ds::comm::cuda_plugin();
    return {{"loads", true}, {"usable_devices", usable_devices()}, {"nccl", nccl_version()}};
  } catch (const std::exception& error) {
    return {{"loads", false}, {"refusal", error.what()}};
  }
}

ordered_json describe_nccl(const ordered_json& cuda) {
  if (!cuda.value("loads", false)) return {{"works", false}, {"refusal", cuda.value("refusal", "")}};
  if (cuda.value("usable_devices", 0) > 0) return {{"works", true}};
  return {{"works", false}, {"refusal", "libdsengine_cuda loads, but finds no usable GPU"}};
}

}  // namespace

int main() {
  const ordered_json cuda = describe_cuda();
  const ordered_json answer = {
      {"libtorch", describe_libtorch()},
      {"backends", {{"gloo", tried(try_gloo)}, {"shm", tried(try_shared_memory)}, {"nccl", describe_nccl(cuda)}}},
      {"cuda", cuda}};
  std::cout << answer.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
  return std::cout.good() ? 0 : 1;
}
