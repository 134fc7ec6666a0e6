#include "comm/rendezvous_address.h"

#include <charconv>
#include <cstdlib>
#include <map>
#include <vector>

#include "core/check.h"

namespace ds::comm {
namespace {

int parse_integer(const std::string& text, const std::string& where) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<ConfigError>(error == std::errc() && end == text.data() + text.size(), where,
                       ": expected an integer, found '", text, "'");
  return value;
}

int parse_port(const std::string& text, const std::string& where) {
  const int port = parse_integer(text, where);
  require<ConfigError>(port > 0 && port < 65536, where, ": expected a port in [1, 65535], found ", port);
  return port;
}

std::optional<int> integer_variable(const EnvironmentReader& environment, const char* name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  return parse_integer(*text, cat("environment variable ", name));
}

std::map<std::string, int> parse_query(const std::string& query, const std::string& init_method) {
  std::map<std::string, int> values;
  for (size_t begin = 0; begin < query.size();) {
    const size_t end = std::min(query.find('&', begin), query.size());
    const std::string pair = query.substr(begin, end - begin);
    const size_t equal = pair.find('=');
    const std::string key = pair.substr(0, equal);
    require<ConfigError>(equal != std::string::npos && (key == "rank" || key == "world_size"), "init_method '",
                         init_method, "': expected rank=R or world_size=W after '?', found '", pair, "'");
    values[key] = parse_integer(pair.substr(equal + 1), cat("init_method '", init_method, "', ", key));
    begin = end + 1;
  }
  return values;
}

// An address of IPv6 stands in brackets: tcp://[::1]:29500.
void parse_host_and_port(const std::string& text, const std::string& init_method, RendezvousAddress& address) {
  const size_t colon = text.rfind(':');
  require<ConfigError>(colon != std::string::npos && colon > 0 && text.back() != ']', "init_method '", init_method,
                       "': expected tcp://host:port, found no port");
  address.host = text.substr(0, colon);
  if (address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  address.port = parse_port(text.substr(colon + 1), cat("init_method '", init_method, "'"));
}

void require_all_set(const EnvironmentReader& environment, const std::vector<const char*>& names,
                     const std::string& init_method) {
  std::string missing;
  std::string present;
  for (const char* name : names) {
    const auto value = environment(name);
    std::string& list = value ? present : missing;
    list += cat(list.empty() ? "" : ", ", name, value ? cat("=", *value) : "");
  }
  require<ConfigError>(
      missing.empty(), "init_method ", init_method, ": ", present.empty() ? "nothing is set" : present, ", but ",
      missing, " is missing. Start the program with ds-launch or torchrun, set all of ",
      "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset RANK, WORLD_SIZE and LOCAL_RANK to run ",
      "one process alone");
}

void check_ranks(const RendezvousAddress& address, const std::string& where) {
  require<ConfigError>(address.world_size >= 1, where, ": expected a world size of at least 1, found ",
                       address.world_size);
  require<ConfigError>(address.rank >= 0 && address.rank < address.world_size, where, ": expected a rank in [0, ",
                       address.world_size, ") for a world of ", address.world_size, ", found ", address.rank);
  const int local_size = address.local_world_size.value_or(address.world_size);
  require<ConfigError>(local_size >= 1 && local_size <= address.world_size, where,
                       ": expected LOCAL_WORLD_SIZE in [1, WORLD_SIZE = ", address.world_size, "], found ", local_size);
  const int local_rank = address.local_rank.value_or(0);
  require<ConfigError>(local_rank >= 0 && local_rank < local_size, where, ": expected LOCAL_RANK in [0, ", local_size,
                       "), found ", local_rank);
}

RendezvousAddress parse_environment(const EnvironmentReader& environment) {
  RendezvousAddress address;
  address.local_rank = integer_variable(environment, "LOCAL_RANK");
  address.local_world_size = integer_variable(environment, "LOCAL_WORLD_SIZE");
  const auto rank = integer_variable(environment, "RANK");
  const auto world_size = integer_variable(environment, "WORLD_SIZE");
  if (!rank && !world_size && !address.local_rank) {
    address.local_world_size.reset();
    return address;
  }
  require_all_set(environment, {"RANK", "WORLD_SIZE"}, "env://");
  address.rank = *rank;
  address.world_size = *world_size;
  check_ranks(address, "environment");
  if (address.world_size == 1) return address;
  require_all_set(environment, {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}, "env://");
  address.place = MeetingPlace::kTcp;
  address.host = *environment("MASTER_ADDR");
  address.port = parse_port(*environment("MASTER_PORT"), "environment variable MASTER_PORT");
  return address;
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

RendezvousAddress parse_rendezvous(const std::string& init_method, const EnvironmentReader& environment) {
  if (init_method == "env://") return parse_environment(environment);
  const bool tcp = init_method.starts_with("tcp://");
  const bool file = init_method.starts_with("file://");
  require<ConfigError>(tcp || file, "init_method: expected env://, tcp://host:port or file:///path, found '",
                       init_method, "'");
  const std::string rest = init_method.substr(tcp ? 6 : 7);
  const size_t mark = std::min(rest.find('?'), rest.size());
  const auto query = parse_query(mark < rest.size() ? rest.substr(mark + 1) : "", init_method);
  const auto choose = [&](const char* key, const char* variable) {
    const auto in_query = query.find(key);
    const auto value =
        in_query != query.end() ? std::optional(in_query->second) : integer_variable(environment, variable);
    require<ConfigError>(value.has_value(), "init_method '", init_method, "': expected ?", key, "= or the environment ",
                         "variable ", variable, ", found neither");
    return *value;
  };
  RendezvousAddress address;
  address.rank = choose("rank", "RANK");
  address.world_size = choose("world_size", "WORLD_SIZE");
  address.local_rank = integer_variable(environment, "LOCAL_RANK");
  address.local_world_size = integer_variable(environment, "LOCAL_WORLD_SIZE");
  check_ranks(address, cat("init_method '", init_method, "'"));
  if (tcp) {
    address.place = MeetingPlace::kTcp;
    parse_host_and_port(rest.substr(0, mark), init_method, address);
  } else {
    address.place = MeetingPlace::kFile;
    address.path = rest.substr(0, mark);
    require<ConfigError>(address.path.starts_with('/'), "init_method '", init_method,
                         "': expected an absolute path, as in file:///tmp/meeting");
  }
  if (address.world_size == 1) address.place = MeetingPlace::kAlone;
  return address;
}

}  // namespace ds::comm
