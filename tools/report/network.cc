#include "tools/report/network.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>
#include <sstream>
#include <string_view>

#include "core/text.h"
#include "tools/report/kernel_text.h"

namespace ds::tool::report {
namespace {

// An address of TEST-NET-1 (RFC 5737), which is nobody's: the route to it is the default route.
constexpr const char* kAnywhere = "192.0.2.1";

std::string address_text(const sockaddr& address) {
  const socklen_t length = address.sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(&address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

bool has_address(const Interface& interface, const std::string& address) {
  return std::find(interface.addresses.begin(), interface.addresses.end(), address) != interface.addresses.end();
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  auto in = classic_stream<std::istringstream>(list);
  for (std::string word; std::getline(in, word, ',');) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

// NCCL's lists: prefixes, or whole names after '='; those that match none after '^'.
std::vector<std::string> matching(const std::vector<Interface>& interfaces, std::string list) {
  const bool none_of = list.starts_with('^');
  if (none_of) list.erase(0, 1);
  const bool whole = list.starts_with('=');
  if (whole) list.erase(0, 1);
  const std::vector<std::string> words = split(list);
  std::vector<std::string> names;
  for (const Interface& interface : interfaces) {
    if (interface.addresses.empty()) continue;
    const bool matches = std::any_of(words.begin(), words.end(), [&](const std::string& word) {
      return whole ? interface.name == word : interface.name.starts_with(word);
    });
    if (matches != none_of) names.push_back(interface.name);
  }
  return names;
}

Choice by_route(const std::vector<Interface>& interfaces, const std::string& own, const std::string& why) {
  for (const Interface& interface : interfaces) {
    if (!own.empty() && has_address(interface, own)) return {{interface.name}, why};
  }
  return {{}, cat(why, ": no route")};
}

std::string in_words(const Choice& choice) {
  std::string names;
  for (const std::string& name : choice.names) names += cat(names.empty() ? "" : ", ", name);
  return cat(names.empty() ? "none" : names, " (", choice.reason, ")");
}

std::string in_words(const Interface& interface) {
  std::string text = cat(interface.name, ": ", interface.state);
  text += interface.mbits ? cat(", ", *interface.mbits, " Mbit/s") : ", speed not told";
  text += cat(", mtu ", interface.mtu);
  for (const std::string& address : interface.addresses) text += cat(", ", address);
  return text + (interface.addresses.empty() ? ", no address" : "");
}

}  // namespace

Interface link_facts(const std::string& name, const std::filesystem::path& root) {
  const std::filesystem::path folder = root / "sys/class/net" / name;
  Interface interface { .name = name, .state = text_of(folder / "operstate") };
  if (interface.state.empty()) interface.state = "unknown";
  const auto speed = number_of(folder / "speed");
  if (speed && *speed > 0) interface.mbits = speed;
  interface.mtu = number_of(folder / "mtu").value_or(0);
  return interface;
}

std::vector<Interface> read_interfaces(const std::filesystem::path& root) {
  std::vector<Interface> interfaces;
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return interfaces;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(found, ::freeifaddrs);
  for (const int family : {AF_PACKET, AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = found; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      auto known = std::find_if(interfaces.begin(), interfaces.end(),
                                [&](const Interface& interface) { return interface.name == entry->ifa_name; });
      if (known == interfaces.end()) known = interfaces.insert(known, link_facts(entry->ifa_name, root));
      if (family != AF_PACKET) known->addresses.push_back(address_text(*entry->ifa_addr));
    }
  }
  return interfaces;
}

Choice gloo_choice(const std::vector<Interface>& interfaces, const Variables& variables,
                   const std::function<std::string(const std::string&)>& own_address) {
  if (const auto asked = variables("GLOO_SOCKET_IFNAME")) {
    return {split(*asked), cat("GLOO_SOCKET_IFNAME=", *asked)};
  }
  constexpr const char* kLocal = "lo where all ranks are on one host, else ";
  if (const auto master = variables("MASTER_ADDR")) {
    return by_route(interfaces, own_address(*master), cat(kLocal, "what reaches MASTER_ADDR=", *master));
  }
  return by_route(interfaces, own_address(kAnywhere),
                  cat(kLocal, "what reaches MASTER_ADDR, which is not set: the default route"));
}

Choice nccl_choice(const std::vector<Interface>& interfaces, const Variables& variables) {
  if (const auto asked = variables("NCCL_SOCKET_IFNAME")) {
    return {matching(interfaces, *asked), cat("NCCL_SOCKET_IFNAME=", *asked)};
  }
  for (const char* list : {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"}) {
    std::vector<std::string> names = matching(interfaces, list);
    if (!names.empty()) return {std::move(names), "NCCL's own choice"};
  }
  return {{}, "NCCL's own choice: no interface has an address"};
}

Section describe(const std::vector<Interface>& interfaces, const Choice& gloo, const Choice& nccl) {
  using nlohmann::ordered_json;
  Section section("network");
  ordered_json list = ordered_json::array();
  std::vector<std::string> lines;
  for (const Interface& interface : interfaces) {
    list.push_back({{"name", interface.name},
                    {"addresses", interface.addresses},
                    {"state", interface.state},
                    {"mbits", interface.mbits ? ordered_json(*interface.mbits) : ordered_json()},
                    {"mtu", interface.mtu}});
    lines.push_back(in_words(interface));
  }
  if (lines.empty()) lines.emplace_back("none");
  section.add("interfaces", list, lines);
  section.add("gloo", {{"interfaces", gloo.names}, {"reason", gloo.reason}}, in_words(gloo));
  section.add("nccl", {{"interfaces", nccl.names}, {"reason", nccl.reason}}, in_words(nccl));
  return section;
}

}  // namespace ds::tool::report
