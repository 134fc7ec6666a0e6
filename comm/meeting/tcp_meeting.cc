#include "comm/meeting/tcp_meeting.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>

#include "core/check.h"
#include "core/system_call.h"
#include "core/unique_fd.h"

namespace ds::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kKnockInterval{3};
constexpr milliseconds kKnockLimit{2000};  // for one address to answer

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  require<CommError>(error == 0, "rendezvous: the host '", host, "' cannot be resolved (", ::gai_strerror(error),
                     "). Set MASTER_ADDR to the name or address of the machine that runs rank 0");
  return {found, ::freeaddrinfo};
}

// 0 when somebody listens there, else the reason.
int knock(const addrinfo& address, milliseconds limit) {
  const UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd waiting{socket.get(), POLLOUT, 0};
  if (::poll(&waiting, 1, static_cast<int>(limit.count())) <= 0) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

bool is_loopback_address(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(*address.ai_addr);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  return address.ai_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(*address.ai_addr).sin6_addr);
}

// Throws where the job meets on this machine alone, which no packet reaches: nobody can come, however long one waits.
// A datagram socket asks the kernel for the way and sends nothing.
void require_way(const addrinfo* candidates, const std::string& host) {
  int error = 0;
  for (const addrinfo* one = candidates; one != nullptr; one = one->ai_next) {
    if (!is_loopback_address(*one)) return;
    const UniqueFd socket(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket.valid()) continue;
    if (::connect(socket.get(), one->ai_addr, one->ai_addrlen) == 0) return;
    const bool is_down = errno == ENETUNREACH || errno == EADDRNOTAVAIL || errno == EHOSTUNREACH || errno == ENETDOWN;
    if (!is_down) return;  // a sandbox that allows no datagrams says nothing of the way
    if (error == 0) error = errno;
  }
  require<CommError>(error == 0, "rendezvous: ", host, " cannot be reached from this machine (", SystemReason(error),
                     "): its loopback interface is down, as in a new network namespace. `ip link set lo up` in that ",
                     "namespace starts it");
}

std::string port_in_use_text(int port) {
  return cat("rendezvous: rank 0 cannot listen on port ", port,
             ", which is in use (another job, or one that has just ended). Choose another with --master_port or "
             "MASTER_PORT; `ss -ltnp | grep ",
             port, "` names the process");
}

void await_listener(const RendezvousAddress& address, Clock::time_point deadline, milliseconds timeout) {
  const AddressList list = resolve(address.host, address.port);
  require_way(list.get(), address.host);
  for (;;) {
    int error = 0;
    for (const addrinfo* candidate = list.get(); candidate != nullptr; candidate = candidate->ai_next) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      error = knock(*candidate, std::clamp(left, milliseconds(1), kKnockLimit));
      if (error == 0) return;
    }
    require<CommError>(Clock::now() < deadline, "rendezvous: rank ", address.rank, " of ", address.world_size,
                       " waited ", timeout.count(), " ms for ", address.rank_zero_listens ? "rank 0" : "torchrun",
                       ", which is missing: nobody listens on ", address.host, ":", address.port, " (",
                       SystemReason(error), "). Look whether ",
                       address.rank_zero_listens ? "rank 0 was started" : "torchrun still runs", ", whether ",
                       "MASTER_ADDR and MASTER_PORT are those of its machine, and whether a firewall is in between");
    std::this_thread::sleep_for(kKnockInterval);
  }
}

// Listens on the job's interface alone. None, so that LibTorch listens on all of them, where `host` is a name, which
// may mean another interface on other hosts, or no address of this machine (one that a router or a container passes
// on).
UniqueFd listen_on_own_address(const RendezvousAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) != 0) return UniqueFd();
  const AddressList list(found, ::freeaddrinfo);
  UniqueFd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!socket.valid() || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) return UniqueFd();
  if (::bind(socket.get(), found->ai_addr, found->ai_addrlen) == 0 && ::listen(socket.get(), SOMAXCONN) == 0) {
    return socket;
  }
  if (errno == EADDRINUSE) throw CommError(port_in_use_text(address.port));
  return UniqueFd();
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_tcp_store(const RendezvousAddress& address, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(address.port);
  options.isServer = address.rank == 0 && address.rank_zero_listens;
  options.numWorkers = static_cast<size_t>(address.world_size);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (!options.isServer) {
    await_listener(address, deadline, timeout);
  } else {
    require_way(resolve(address.host, address.port).get(), address.host);
    const UniqueFd own = listen_on_own_address(address);
    if (own.valid()) options.masterListenFd = ::fcntl(own.get(), F_DUPFD_CLOEXEC, 3);  // LibTorch's from here on
  }
  try {
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(address.host, options);
    if (address.prefix.empty()) return store;
    return c10::make_intrusive<c10d::PrefixStore>(address.prefix, store);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const bool in_use = text.find("EADDRINUSE") != std::string::npos || text.find("in use") != std::string::npos;
    if (in_use) throw CommError(port_in_use_text(address.port));
    throw CommError(cat("rendezvous: rank ", address.rank, " could not open the store at ", address.host, ":",
                        address.port, ": ", text.substr(0, text.find('\n'))));
  }
}

}  // namespace ds::comm
