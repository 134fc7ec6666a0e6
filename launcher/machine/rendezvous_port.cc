#include "launcher/machine/rendezvous_port.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/system_call.h"
#include "core/text.h"
#include "core/unique_fd.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace {

constexpr int kBacklog = 128;

// The addresses that a socket of IPv6 listens to.
enum class Families { kOwn, kBoth };

UniqueFd open_tcp_socket(int family, Families families = Families::kOwn) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.valid()) {
    const int on = 1;  // as the listening store does: connections that linger from the last run do not block the port
    const int alone = families == Families::kOwn ? 1 : 0;
    setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &alone, sizeof(alone));
  }
  return socket;
}

// `socket` listens on all addresses of the family, or the error number of socket(), bind() or listen(). All are asked:
// with SO_REUSEADDR two sockets may bind one port, and only the second listen() fails.
int try_listen(int family, Families families, int port, UniqueFd& socket) {
  socket = open_tcp_socket(family, families);
  if (!socket.valid()) return errno;
  sockaddr_in6 v6{};
  sockaddr_in v4{};
  v6.sin6_family = AF_INET6;
  v4.sin_family = AF_INET;
  v6.sin6_port = v4.sin_port = htons(static_cast<uint16_t>(port));
  const auto* address =
      family == AF_INET6 ? reinterpret_cast<const sockaddr*>(&v6) : reinterpret_cast<const sockaddr*>(&v4);
  const socklen_t size = family == AF_INET6 ? sizeof(v6) : sizeof(v4);
  return bind(socket.get(), address, size) == 0 && listen(socket.get(), kBacklog) == 0 ? 0 : errno;
}

// Said by socket() or by bind() where the family is switched off.
bool lacks_family(int error) { return error == EAFNOSUPPORT || error == EADDRNOTAVAIL; }

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

// Empty when this machine has the address, else why not.
std::string resolve_own_address(const std::string& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.c_str(), nullptr, &hints, &found);
  if (error != 0) return gai_strerror(error);
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    UniqueFd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.valid() && bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0) return "";
  }
  return "it is not an address of this machine";
}

// Takes a name that only one process of the network namespace can have, and that the kernel frees with it.
bool reserve(int port) {
  static std::map<int, UniqueFd> reserved;  // by this process
  if (reserved.contains(port)) return true;
  UniqueFd name(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const std::string text = cat("dsengine/rendezvous-port/", port);
  sockaddr_un address{};  // with a zero byte first: a name without a file
  address.sun_family = AF_UNIX;
  text.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  require_system(name.valid(), "a socket to reserve port ", port);
  if (bind(name.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    require_system(errno == EADDRINUSE, "reserving port ", port);
    return false;
  }
  reserved.emplace(port, std::move(name));
  return true;
}

int find_free_port() {
  for (int attempt = 0; attempt < 16; ++attempt) {
    UniqueFd socket = open_tcp_socket(AF_INET);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    socklen_t size = sizeof(any);
    const bool bound = bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), size) == 0 &&
                       getsockname(socket.get(), reinterpret_cast<sockaddr*>(&any), &size) == 0;
    require_system(bound, "no free port for rank 0");
    socket.reset();
    const int port = ntohs(any.sin_port);
    if (!port_in_use(port) && reserve(port)) return port;
  }
  throw UsageError("no port is free on both IPv4 and IPv6; name one with --master_port");
}

}  // namespace

bool port_in_use(int port) {
  for (int family : {AF_INET, AF_INET6}) {
    UniqueFd socket;
    const int error = try_listen(family, Families::kOwn, port, socket);
    if (lacks_family(error)) continue;
    if (error == EADDRINUSE) return true;
    require<UsageError>(error == 0, "rank 0 cannot listen on port ", port, ": ", std::strerror(error),
                        error == EACCES ? "; ports below 1024 need root, choose a higher --master_port" : "");
  }
  return false;
}

int listen_on_all_interfaces(int port, UniqueFd& socket) {
  const int error = try_listen(AF_INET6, Families::kBoth, port, socket);
  return lacks_family(error) ? try_listen(AF_INET, Families::kOwn, port, socket) : error;
}

bool is_own_address(const std::string& address) { return resolve_own_address(address).empty(); }

void require_own_address(const std::string& address) {
  const std::string trouble = resolve_own_address(address);
  require<UsageError>(trouble.empty(), "--master_addr ", address, ": ", trouble,
                      ", where rank 0 is to listen; leave the flag out, or name an address that `ip address` lists");
}

std::string outward_address(const std::vector<std::string>& environment) {
  auto connection = classic_stream<std::istringstream>(environment_value(environment, "SSH_CONNECTION").value_or(""));
  std::string client, client_port, server;
  if (connection >> client >> client_port >> server && !is_loopback(server)) return server;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  for (int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
      const bool usable = entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == family &&
                          (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_LOOPBACK) == 0;
      char text[NI_MAXHOST] = "";
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      if (!usable || getnameinfo(entry->ifa_addr, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) continue;
      if (std::strchr(text, '%') == nullptr) return text;  // not an address that means something on one link only
    }
  }
  return "";
}

MasterPort choose_master_port(const std::optional<int>& asked) {
  if (asked) {
    require<UsageError>(!port_in_use(*asked), "--master_port ", *asked,
                        " is in use by another process (see: ss -ltnp 'sport = :", *asked,
                        "'); name another, or leave the flag out and a free port is chosen");
    reserve(*asked);  // where another ds-launch has it, its ranks may never listen (a shell that starts this one)
    return {.port = *asked};
  }
  if (!port_in_use(kDefaultMasterPort) && reserve(kDefaultMasterPort)) return {.port = kDefaultMasterPort};
  return {.port = find_free_port(), .replaced_default = true};
}

}  // namespace ds::launcher
