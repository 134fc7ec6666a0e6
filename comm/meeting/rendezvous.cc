#include "comm/meeting/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/meeting/host_identity.h"
#include "comm/meeting/quiet_store.h"
#include "comm/meeting/rendezvous_address.h"
#include "comm/meeting/tcp_meeting.h"
#include "core/check.h"
#include "core/joined_file.h"
#include "core/system_call.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kStoreEnded = "rank 0, which holds it, has most likely ended: look at its log first";

std::string arrival_key(int rank) { return cat("arrival/", rank); }

std::string arrival_text(const RankPlace& place, int world_size) {
  return nlohmann::json{{"host", place.host_name},
                        {"pid", place.process},
                        {"domain", place.domain},
                        {"address", place.address},
                        {"world_size", world_size}}
      .dump();
}

std::string text_of(const RankPlace& place) { return cat(place.host_name, ", pid ", place.process); }

RankPlace read_arrival(const std::string& text, int rank, int world_size) {
  const auto json = nlohmann::json::parse(text);
  RankPlace place{json.at("host"), json.at("pid"), json.at("domain"), json.at("address")};
  const int theirs = json.at("world_size");
  require<CommError>(theirs == world_size, "rendezvous: rank ", rank, " (", lazy([&] { return text_of(place); }),
                     ") expects a world of ", theirs, " ranks, this rank one of ", world_size,
                     ". Set WORLD_SIZE to the same value everywhere");
  return place;
}

// Registers this rank. A second claim of the same rank is an error for the one that comes later.
void arrive(c10d::Store& store, const RankPlace& place, int rank, int world_size) {
  const int64_t claims = store.add(cat("claims/", rank), 1);
  if (claims > 1) {
    std::string first = "another process";
    if (store.check({arrival_key(rank)})) {
      first = text_of(read_arrival(store.get_to_str(arrival_key(rank)), rank, world_size));
    }
    throw CommError(cat("rendezvous: rank ", rank, " was claimed twice: by ", first, " and by ", text_of(place),
                        ". Give every process its own RANK; a file of an earlier run must be deleted, another job "
                        "needs another port, and a job of torchrun that takes hosts in or out a new start"));
  }
  store.set(arrival_key(rank), arrival_text(place, world_size));
}

std::string missing_ranks(c10d::Store& store, int world_size) {
  std::string missing;
  std::string present;
  for (int r = 0; r < world_size; ++r) {
    if (store.check({arrival_key(r)})) {
      const RankPlace place = read_arrival(store.get_to_str(arrival_key(r)), r, world_size);
      present += cat(present.empty() ? "" : "; ", r, " (", text_of(place), ")");
    } else {
      missing += cat(missing.empty() ? "" : ", ", r);
    }
  }
  return missing.empty() ? cat("all have come by now: ", present)
                         : cat("missing: rank ", missing, "; present: ", present);
}

// What the store says after it failed with `cause`.
std::string ranks_after(const std::string& cause, c10d::Store& store, int world_size) {
  try {
    return missing_ranks(store, world_size);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return cat("the store does not answer any more (", cause, "): ", kStoreEnded);
  }
}

[[noreturn]] void fail_waiting(const std::string& cause, const std::string& who, int world_size, milliseconds waited,
                               milliseconds timeout) {
  // The store failed before the time was up, or went away.
  if (waited < timeout - timeout / 10) {
    throw CommError(cat("rendezvous: this rank waited ", waited.count(), " ms for all of ", world_size,
                        " ranks, then the store failed: ", cause, "; ", who));
  }
  throw CommError(cat("rendezvous: not all of ", world_size, " ranks came within ", timeout.count(), " ms; ", who,
                      ". Look whether those processes were started, with the same MASTER_ADDR and MASTER_PORT"));
}

// `left`: what is left of `timeout`.
std::vector<RankPlace> await_all(c10d::Store& store, int world_size, std::chrono::milliseconds left,
                                 std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int r = 0; r < world_size; ++r) keys.push_back(arrival_key(r));
  const auto begin = Clock::now();
  std::vector<RankPlace> ranks;
  try {
    store.wait(keys, left);
    for (int r = 0; r < world_size; ++r) ranks.push_back(read_arrival(store.get_to_str(keys[r]), r, world_size));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
    const std::string cause = without_stack(error.what());
    fail_waiting(cause, ranks_after(cause, store, world_size), world_size, waited + (timeout - left), timeout);
  }
  return ranks;
}

Rendezvous meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const std::string& address,
                Clock::time_point start, std::chrono::milliseconds timeout) {
  const RankPlace place{host_name(), ::getpid(), shared_memory_domain(), address};
  auto meeting = c10::make_intrusive<c10d::PrefixStore>("rendezvous", store);
  store->setTimeout(timeout);
  note_joined();
  const QuietStore quiet;  // waits at most until the others have come, or rank 0 has ended
  try {
    arrive(*meeting, place, rank, world_size);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(cat("rendezvous: rank ", rank, " came to the store, which does not answer (",
                        without_stack(error.what()), "): ", kStoreEnded));
  }
  const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  const auto left = std::max(timeout - spent, std::chrono::milliseconds(1));
  Rendezvous result{.store = store, .rank = rank, .world_size = world_size, .timeout = timeout};
  result.ranks = await_all(*meeting, world_size, left, timeout);
  for (const auto& host : result.hosts()) {
    const auto own = std::find(host.begin(), host.end(), rank);
    if (own == host.end()) continue;
    result.local_rank = static_cast<int>(own - host.begin());
    result.local_world_size = static_cast<int>(host.size());
  }
  return result;
}

c10::intrusive_ptr<c10d::Store> open_file_store(const RendezvousAddress& address) {
  const auto folder = std::filesystem::path(address.path).parent_path();
  // The order in which arguments are evaluated is open: errno is read after the call.
  const int error = ::access(folder.c_str(), W_OK | X_OK) == 0 ? 0 : errno;
  require<ConfigError>(error == 0, "init_method file://", address.path, ": the folder ", folder.native(),
                       " cannot be written (", SystemReason(error),
                       "). Name a file in a folder that exists and that every rank can write");
  return c10::make_intrusive<c10d::FileStore>(address.path, address.world_size);
}

Rendezvous alone(std::chrono::milliseconds timeout) {
  Rendezvous result{.timeout = timeout};
  result.ranks = {{host_name(), ::getpid(), shared_memory_domain(), {}}};
  return result;
}

}  // namespace

std::vector<std::vector<int>> Rendezvous::hosts() const {
  std::vector<std::vector<int>> groups;
  std::map<std::string, size_t> index;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    const auto [position, fresh] = index.try_emplace(ranks[r].domain, groups.size());
    if (fresh) groups.emplace_back();
    groups[position->second].push_back(r);
  }
  return groups;
}

std::vector<std::string> Rendezvous::descriptions() const {
  std::vector<std::string> texts;
  for (const RankPlace& place : ranks) texts.push_back(text_of(place));
  return texts;
}

Rendezvous rendezvous(const RendezvousOptions& options) {
  const auto start = Clock::now();
  const RendezvousAddress address = parse_rendezvous(options.init_method, process_environment);
  Rendezvous result;
  switch (address.place) {
    case MeetingPlace::kAlone:
      result = alone(options.timeout);
      break;
    case MeetingPlace::kTcp:
      result = meet(open_tcp_store(address, options.timeout), address.rank, address.world_size,
                    address_towards(address.host), start, options.timeout);
      break;
    case MeetingPlace::kFile:
      result = meet(open_file_store(address), address.rank, address.world_size, {}, start, options.timeout);
      break;
  }
  // The launcher's word counts (it chose the device); what the ranks found out is for where it said nothing.
  if (address.local_rank) result.local_rank = *address.local_rank;
  return result;
}

Rendezvous rendezvous(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                      std::chrono::milliseconds timeout) {
  require<UsageError>(world_size >= 1 && rank >= 0 && rank < world_size,
                      "rendezvous: expected a rank in [0, world size), ", "found rank ", rank, " of ", world_size);
  if (world_size == 1) {
    Rendezvous result = alone(timeout);
    result.store = store;
    return result;
  }
  return meet(store, rank, world_size, {}, Clock::now(), timeout);
}

}  // namespace ds::comm
