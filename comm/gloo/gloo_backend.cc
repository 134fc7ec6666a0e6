#include "comm/gloo/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>
#include <sstream>

#include "core/check.h"
#include "core/text.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

using c10d::ProcessGroupGloo;

std::vector<std::shared_ptr<gloo::transport::Device>> open_devices(const GlooOptions& options) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces == nullptr || *interfaces == '\0') {
    return {options.address.empty() ? ProcessGroupGloo::createDefaultDevice(options.lazy)
                                    : ProcessGroupGloo::createDeviceForHostname(options.address, options.lazy)};
  }
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  auto list = classic_stream<std::istringstream>(interfaces);
  for (std::string name; std::getline(list, name, ',');) {
    devices.push_back(ProcessGroupGloo::createDeviceForInterface(name, options.lazy));
  }
  return devices;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const GlooOptions& options) {
  auto gloo_options = ProcessGroupGloo::Options::create(options.timeout);
  try {
    gloo_options->devices = open_devices(options);
  } catch (const std::exception& error) {
    throw CommError(
        cat("gloo: rank ", rank, " cannot open a network interface (address '", options.address,
            "', GLOO_SOCKET_IFNAME '", std::getenv("GLOO_SOCKET_IFNAME") ? std::getenv("GLOO_SOCKET_IFNAME") : "",
            "'): ", without_stack(error.what()), ". Set GLOO_SOCKET_IFNAME to an interface that `ip addr` lists."));
  }
  try {
    return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, gloo_options);
  } catch (const std::exception& error) {
    throw CommError(cat("gloo: rank ", rank, " of ", size, " could not connect to the other ranks within ",
                        options.timeout.count(), " ms: ", without_stack(error.what()),
                        ". Look whether every rank is alive and whether a firewall blocks TCP between the hosts."));
  }
}

}  // namespace ds::comm
