#include "comm/meeting/rendezvous_address.h"

#include <algorithm>
#include <map>
#include <vector>

#include "comm/meeting/started_place.h"
#include "core/check.h"

namespace ds::comm {
namespace {

int parse_port(const std::string& text, const std::string& where) {
  const int port = parse_integer(text, where);
  require<ConfigError>(port > 0 && port < 65536, where, ": expected a port in [1, 65535], found ", port);
  return port;
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
      missing, " is missing. Start the program with ds-launch, torchrun, srun or mpirun, set all of ",
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

// Fills in what is not set; what is set to something else contradicts.
void take_from_starter(std::optional<int>& value, const char* variable, const std::optional<int>& started,
                       const StartedPlace& place) {
  require<ConfigError>(!value || !started || *value == *started, "environment: ", variable, "=", value.value_or(0),
                       ", but ", place.starter, " says ", started.value_or(0), " (rank ", place.rank, " of ",
                       place.world_size, ", from ", place.rank_variables, "). Unset ", variable,
                       ", or set both RANK and WORLD_SIZE, which win");
  if (!value) value = started;
}

// The rank of this process, and where it comes from. RANK and WORLD_SIZE together win over what started it.
struct Identity {
  std::optional<int> rank, world_size, local_rank, local_world_size;
  std::optional<StartedPlace> started;  // absent where RANK and WORLD_SIZE are set
};

Identity find_identity(const EnvironmentReader& environment) {
  Identity found{.rank = integer_variable(environment, "RANK"),
                 .world_size = integer_variable(environment, "WORLD_SIZE"),
                 .local_rank = integer_variable(environment, "LOCAL_RANK"),
                 .local_world_size = integer_variable(environment, "LOCAL_WORLD_SIZE"),
                 .started = std::nullopt};
  if (found.rank && found.world_size) return found;
  found.started = started_place(environment);
  if (!found.started) return found;
  take_from_starter(found.rank, "RANK", found.started->rank, *found.started);
  take_from_starter(found.world_size, "WORLD_SIZE", found.started->world_size, *found.started);
  take_from_starter(found.local_rank, "LOCAL_RANK", found.started->local_rank, *found.started);
  take_from_starter(found.local_world_size, "LOCAL_WORLD_SIZE", found.started->local_world_size, *found.started);
  return found;
}

// Workers of torchrun meet in the store of its agent, under a name for each of its restarts.
void find_agent(const EnvironmentReader& environment, RendezvousAddress& address) {
  if (environment("TORCHELASTIC_USE_AGENT_STORE") != "True") return;
  address.rank_zero_listens = false;
  address.prefix = cat("/worker/attempt_", environment("TORCHELASTIC_RESTART_COUNT").value_or("0"));
}

void find_master(const EnvironmentReader& environment, const std::optional<StartedPlace>& started,
                 RendezvousAddress& address) {
  if (!started) require_all_set(environment, {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}, "env://");
  const auto host = environment("MASTER_ADDR");
  require<ConfigError>(host || !started->host.empty(), "init_method env://: MASTER_ADDR is missing for rank ",
                       address.rank, " of ", address.world_size, ", which ", started ? started->starter : "",
                       " started: ", started ? started->why_no_host : "");
  address.place = MeetingPlace::kTcp;
  address.host = host ? *host : started->host;
  const auto port = environment("MASTER_PORT");
  address.port = port ? parse_port(*port, "environment variable MASTER_PORT") : started->port;
}

RendezvousAddress parse_environment(const EnvironmentReader& environment) {
  RendezvousAddress address;
  const Identity identity = find_identity(environment);
  if (!identity.rank && !identity.world_size && !identity.local_rank) return address;
  if (!identity.started) require_all_set(environment, {"RANK", "WORLD_SIZE"}, "env://");
  address.rank = *identity.rank;
  address.world_size = *identity.world_size;
  address.local_rank = identity.local_rank;
  address.local_world_size = identity.local_world_size;
  check_ranks(address, identity.started ? cat("environment (", identity.started->starter, ": ",
                                              identity.started->rank_variables, ")")
                                        : "environment");
  if (address.world_size == 1) return address;
  find_master(environment, identity.started, address);
  if (!identity.started) find_agent(environment, address);
  return address;
}

}  // namespace

RendezvousAddress parse_rendezvous(const std::string& init_method, const EnvironmentReader& environment) {
  if (init_method == "env://") return parse_environment(environment);
  const bool tcp = init_method.starts_with("tcp://");
  const bool file = init_method.starts_with("file://");
  require<ConfigError>(tcp || file, "init_method: expected env://, tcp://host:port or file:///path, found '",
                       init_method, "'");
  const std::string rest = init_method.substr(tcp ? 6 : 7);
  const size_t mark = std::min(rest.find('?'), rest.size());
  const auto query = parse_query(mark < rest.size() ? rest.substr(mark + 1) : "", init_method);
  const bool complete = query.contains("rank") && query.contains("world_size");
  const Identity identity = complete ? Identity{} : find_identity(environment);
  const auto choose = [&](const char* key, const char* variable, const std::optional<int>& otherwise) {
    const auto in_query = query.find(key);
    const auto value = in_query != query.end() ? std::optional(in_query->second) : otherwise;
    require<ConfigError>(value.has_value(), "init_method '", init_method, "': expected ?", key, "= or the environment ",
                         "variable ", variable, ", found neither");
    return *value;
  };
  RendezvousAddress address;
  address.rank = choose("rank", "RANK", identity.rank);
  address.world_size = choose("world_size", "WORLD_SIZE", identity.world_size);
  address.local_rank = complete ? integer_variable(environment, "LOCAL_RANK") : identity.local_rank;
  address.local_world_size = complete ? integer_variable(environment, "LOCAL_WORLD_SIZE") : identity.local_world_size;
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
