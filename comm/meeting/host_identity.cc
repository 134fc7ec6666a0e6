#include "comm/meeting/host_identity.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>

#include "core/text.h"
#include "core/unique_fd.h"

namespace ds::comm {
namespace {

std::string link_identity(const char* path) {
  struct stat info {};
  if (::stat(path, &info) != 0) return "none";
  return cat(info.st_dev, ".", info.st_ino);
}

}  // namespace

std::string shared_memory_domain() {
  std::string boot = host_name();
  auto file = classic_stream<std::ifstream>("/proc/sys/kernel/random/boot_id");
  file >> boot;
  return cat(boot, "/", link_identity("/dev/shm"), "/", link_identity("/proc/self/ns/pid"));
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown-host";
  return name.data();
}

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  for (const addrinfo* candidate = found; candidate != nullptr; candidate = candidate->ai_next) {
    const UniqueFd socket(::socket(candidate->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket.valid()) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    // Connecting a datagram socket picks the route and sends nothing.
    const bool routed = ::connect(socket.get(), candidate->ai_addr, candidate->ai_addrlen) == 0 &&
                        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0;
    std::array<char, NI_MAXHOST> text{};
    if (routed && ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text.data(), text.size(), nullptr, 0,
                                NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  return {};
}

bool is_loopback(const std::string& host) {
  in_addr four{};
  in6_addr six{};
  if (::inet_pton(AF_INET, host.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == IN_LOOPBACKNET;
  if (::inet_pton(AF_INET6, host.c_str(), &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six);
  return host == "localhost";
}

}  // namespace ds::comm
