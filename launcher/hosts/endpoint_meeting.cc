#include "launcher/hosts/endpoint_meeting.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/number_text.h"
#include "core/shown_text.h"
#include "core/system_call.h"
#include "core/unique_fd.h"
#include "launcher/machine/rendezvous_port.h"
#include "launcher/processes/deadline.h"
#include "launcher/processes/orphan_guard.h"
#include "launcher/protocol/message.h"

namespace ds::launcher {
namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

constexpr auto kBetweenTries = std::chrono::milliseconds(100);
constexpr auto kBetweenQuestions = std::chrono::seconds(1);  // to the name service, for a name that it does not know

std::string name_of(const Endpoint& endpoint) { return cat(endpoint.host, ':', endpoint.port); }

// None, with the reason in `trouble`, where the name is not known now: that of a container is when the container runs.
AddressList addresses_of(const Endpoint& endpoint, std::string& trouble, int flags = 0) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  trouble = error == 0 ? "" : cat("the name ", endpoint.host, " is not known here (", gai_strerror(error), ")");
  return {error == 0 ? found : nullptr, freeaddrinfo};
}

int number_in(const std::string& text, int most = 1 << 24) {
  const auto value = parse_whole_number(text);
  require<CommError>(value && *value >= 0 && *value <= most, "a ds-launch at the endpoint sent ", shown_text(text),
                     " where a number is expected; are all of one version?");
  return static_cast<int>(*value);
}

void send_all(int fd, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t now = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return;  // whoever is gone is noticed where it is read
    sent += static_cast<size_t>(now);
  }
}

// Appends what has come. False: the other side is gone.
bool take_bytes(int fd, MessageReader& reader) {
  char bytes[4096];
  const ssize_t count = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  reader.feed({bytes, static_cast<size_t>(count)});
  return count > 0;
}

// --- the node that listens

struct Guest {
  UniqueFd socket;
  MessageReader reader{/*greeted=*/false};
  std::optional<Arrival> arrival;
};

class MeetingHost {
 public:
  MeetingHost(const Endpoint& endpoint, const Arrival& own, UniqueFd listener)
      : endpoint_(endpoint), own_(own), listener_(std::move(listener)) {}

  GivenPlace run() {
    const Deadline deadline = Deadline::in(endpoint_.limit_seconds);
    while (arrived() < own_.nodes) {
      require<CommError>(!deadline.passed(), "--rdzv_endpoint ", name_of(endpoint_), ": expected ", own_.nodes,
                         " nodes within ", endpoint_.limit_seconds, " s (--join_timeout), found ", arrived(), ": ",
                         names());
      wait(deadline);
    }
    return give_places();
  }

 private:
  int arrived() const {
    return 1 + static_cast<int>(
                   std::count_if(guests_.begin(), guests_.end(), [](const Guest& guest) { return !!guest.arrival; }));
  }
  std::string names() const {
    std::string result = own_.host;
    for (const Guest& guest : guests_) {
      if (guest.arrival) result += cat(", ", guest.arrival->host);
    }
    return result;
  }

  void wait(const Deadline& deadline) {
    std::vector<pollfd> polled = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests_) polled.push_back({.fd = guest.socket.get(), .events = POLLIN, .revents = 0});
    if (poll(polled.data(), polled.size(), deadline.poll_timeout_ms()) <= 0) return;
    std::vector<size_t> gone;
    for (size_t i = 0; i < guests_.size(); ++i) {
      if (polled[i + 1].revents != 0 && !hear(guests_[i])) gone.push_back(i);
    }
    for (auto i = gone.rbegin(); i != gone.rend(); ++i)
      guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(*i));
    if (polled[0].revents == 0) return;
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket.valid()) guests_.push_back({.socket = std::move(socket), .reader = MessageReader(false), .arrival = {}});
  }

  // False: this one is left out from now on.
  bool hear(Guest& guest) {
    const bool there = take_bytes(guest.socket.get(), guest.reader);
    try {
      while (const auto message = guest.reader.next()) {
        if (message->kind != MessageKind::kArrive || message->fields.size() != 4) return false;
        Arrival arrival{.id = message->fields[0],
                        .nodes = number_in(message->fields[1]),
                        .ranks = number_in(message->fields[2]),
                        .host = message->fields[3]};
        if (!admits(guest, arrival)) return false;
        if (arrived() < own_.nodes) guest.arrival = std::move(arrival);
      }
    } catch (const CommError&) {  // a stranger on this port
      return false;
    }
    return there;
  }

  bool admits(const Guest& guest, const Arrival& arrival) {
    if (arrival.id != own_.id) {
      refuse(guest, cat("the job at ", name_of(endpoint_), " has --rdzv_id '", own_.id, "', found '", arrival.id,
                        "' on ", arrival.host));
      return false;
    }
    if (arrival.nodes == own_.nodes) return true;
    const std::string text = cat("the nodes do not agree on --nnodes: ", own_.nodes, " on ", own_.host, ", ",
                                 arrival.nodes, " on ", arrival.host, "; start the same line on all of them");
    refuse(guest, text);
    for (const Guest& other : guests_) {
      if (other.arrival) refuse(other, text);
    }
    throw ConfigError(cat("--rdzv_endpoint: ", text));
  }

  static void refuse(const Guest& guest, const std::string& text) {
    send_all(guest.socket.get(), encode({.kind = MessageKind::kRefused, .fields = {text}}));
  }

  GivenPlace give_places() {
    GivenPlace own{.master_port = choose_master_port({}).port, .flight_job = new_launch_id()};
    own.world_size = own_.ranks;
    for (const Guest& guest : guests_) own.world_size += guest.arrival ? guest.arrival->ranks : 0;
    int node = 0;
    int first_rank = own_.ranks;
    for (const Guest& guest : guests_) {
      if (!guest.arrival) continue;
      send_all(guest.socket.get(),
               encode({.kind = MessageKind::kPlace,
                       .fields = {std::to_string(++node), std::to_string(first_rank), std::to_string(own.world_size),
                                  std::to_string(own.master_port), own.flight_job}}));
      first_rank += guest.arrival->ranks;
    }
    return own;
  }

  const Endpoint& endpoint_;
  const Arrival& own_;
  UniqueFd listener_;
  std::vector<Guest> guests_;  // in the order of their coming
};

int listen_at_address(const addrinfo& address, UniqueFd& socket) {
  socket = UniqueFd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno;
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool listens = bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 && listen(socket.get(), 128) == 0;
  return listens ? 0 : errno;
}

// On an address where the endpoint is one. A name may mean another address here than elsewhere (Debian's /etc/hosts has
// 127.0.1.1 for the machine's own), so that it stands for all interfaces. None where the port is taken, or, with the
// reason in `trouble`, where this process may not listen.
std::optional<UniqueFd> listen_at(const Endpoint& endpoint, std::string& trouble) {
  std::string why_not;  // it is a name then
  const AddressList address = addresses_of(endpoint, why_not, AI_NUMERICHOST);
  UniqueFd socket;
  const int error = address ? listen_at_address(*address, socket) : listen_on_all_interfaces(endpoint.port, socket);
  if (error == 0) return socket;
  if (error != EADDRINUSE) trouble = cat("this machine, which has that address, cannot listen: ", SystemReason(error));
  return std::nullopt;
}

// --- the others

std::optional<UniqueFd> connect_to(const addrinfo* addresses) {
  for (const addrinfo* entry = addresses; entry != nullptr; entry = entry->ai_next) {
    UniqueFd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) continue;
    if (connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0 && errno != EINPROGRESS) continue;
    pollfd polled{.fd = socket.get(), .events = POLLOUT, .revents = 0};
    int error = 0;
    socklen_t size = sizeof(error);
    if (poll(&polled, 1, 1000) == 1 && getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
        error == 0) {
      return socket;
    }
  }
  return std::nullopt;
}

// The answer of the listening node; none where it has gone without a word, as one that ends its last meeting does.
std::optional<GivenPlace> ask_for_place(const UniqueFd& socket, const Arrival& arrival, const Deadline& deadline) {
  const Message hello{
      .kind = MessageKind::kArrive,
      .fields = {arrival.id, std::to_string(arrival.nodes), std::to_string(arrival.ranks), arrival.host}};
  send_all(socket.get(), cat(kGreeting, encode(hello)));
  MessageReader reader(/*greeted=*/true);
  while (!deadline.passed()) {
    pollfd polled{.fd = socket.get(), .events = POLLIN, .revents = 0};
    if (poll(&polled, 1, deadline.poll_timeout_ms()) <= 0) continue;
    const bool there = take_bytes(socket.get(), reader);
    if (const auto message = reader.next()) {
      require<ConfigError>(message->kind != MessageKind::kRefused || message->fields.empty(),
                           "--rdzv_endpoint: ", message->fields.empty() ? "" : message->fields.front());
      require<CommError>(message->kind == MessageKind::kPlace && message->fields.size() == 5,
                         "--rdzv_endpoint: expected a place, found another message; are all ds-launch of one version?");
      return GivenPlace{.node = number_in(message->fields[0]),
                        .first_rank = number_in(message->fields[1]),
                        .world_size = number_in(message->fields[2]),
                        .master_port = number_in(message->fields[3]),
                        .flight_job = message->fields[4]};
    }
    if (!there) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

GivenPlace meet_at_endpoint(const Endpoint& endpoint, const Arrival& arrival,
                            const std::function<void(const std::string&)>& warn) {
  const Deadline deadline = Deadline::in(endpoint.limit_seconds);
  std::string trouble;
  bool answered = false;
  bool warned = false;
  for (;;) {
    const AddressList addresses = addresses_of(endpoint, trouble);
    if (addresses && is_own_address(endpoint.host)) {
      if (auto listener = listen_at(endpoint, trouble)) {
        return MeetingHost(endpoint, arrival, *std::move(listener)).run();
      }
    }
    if (const auto socket = connect_to(addresses.get())) {
      answered = true;
      if (const auto place = ask_for_place(*socket, arrival, deadline)) return *place;
    }
    if (!trouble.empty() && !std::exchange(warned, true)) {
      warn(cat("--rdzv_endpoint ", name_of(endpoint), ": ", trouble, "; trying again for up to ",
               endpoint.limit_seconds, " s (--join_timeout)"));
    }
    if (trouble.empty()) trouble = answered ? "not all nodes came" : "no ds-launch answered there";
    require<CommError>(!deadline.passed(), "--rdzv_endpoint ", name_of(endpoint), ": ", trouble, " within ",
                       endpoint.limit_seconds, " s (--join_timeout). Is the same line started on ", endpoint.host,
                       ", and may this machine connect to it?");
    std::this_thread::sleep_for(addresses ? kBetweenTries : kBetweenQuestions);
  }
}

}  // namespace ds::launcher
