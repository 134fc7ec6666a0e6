#include "comm/meeting/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>

#include "comm/meeting/host_identity.h"
#include "comm/meeting/quiet_store.h"
#include "comm/meeting/rendezvous_address.h"
#include "comm/meeting/strangers.h"
#include "comm/meeting/tcp_meeting.h"
#include "core/check.h"
#include "core/files/joined_file.h"
#include "core/log.h"
#include "core/secret/job_secret.h"
#include "core/system_call.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Secret = std::optional<JobSecret>;

constexpr const char* kStoreEnded = "rank 0, which holds it, has most likely ended: look at its log first";

std::string arrival_key(int rank) { return cat("arrival/", rank); }

// Registers this rank. A second claim of the same rank is an error for the one that comes later.
void arrive(c10d::Store& store, const RankPlace& place, int rank, int world_size, const Secret& secret) {
  const int64_t claims = store.add(cat("claims/", rank), 1);
  if (claims > 1) {
    std::string first = "another process";
    if (store.check({arrival_key(rank)})) {
      first = text_of(read_arrival(store.get_to_str(arrival_key(rank)), rank, world_size, secret));
    }
    throw CommError(cat("rendezvous: rank ", rank, " was claimed twice: by ", first, " and by ", text_of(place),
                        ". Give every process its own RANK; a file of an earlier run must be deleted, another job "
                        "needs another port, and a job of torchrun that takes hosts in or out a new start"));
  }
  store.set(arrival_key(rank), arrival_text(place, rank, world_size, secret));
}

std::string missing_ranks(c10d::Store& store, int world_size, const Secret& secret) {
  std::string missing;
  std::string present;
  for (int r = 0; r < world_size; ++r) {
    if (store.check({arrival_key(r)})) {
      const RankPlace place = read_arrival(store.get_to_str(arrival_key(r)), r, world_size, secret);
      present += cat(present.empty() ? "" : "; ", r, " (", text_of(place), ")");
    } else {
      missing += cat(missing.empty() ? "" : ", ", r);
    }
  }
  return missing.empty() ? cat("all have come by now: ", present)
                         : cat("missing: rank ", missing, "; present: ", present);
}

// Returns which ranks the store misses after it failed with `cause`.
std::string ranks_after(const std::string& cause, c10d::Store& store, int world_size, const Secret& secret) {
  try {
    return missing_ranks(store, world_size, secret);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return cat("the store does not answer any more (", cause, "): ", kStoreEnded);
  }
}

// This rank, and what it comes with.
struct Coming {
  int rank = 0;
  int world_size = 1;
  std::string address;
  Secret secret;
  c10::intrusive_ptr<c10d::Store> outside;  // of a port, which strangers may reach; else null
};

constexpr const char* kOneSecret =
    "Start this process with the ds-launch of that job; where srun, mpirun or a script starts the ranks, give all of "
    "them the same value, or none. A job of another user, or an earlier start, may have this MASTER_PORT";

// Why this rank and rank 0 are not of one job; empty: they are, as far as is known.
std::string difference_of_secrets(SecretOfFirst first, bool has_secret) {
  switch (first) {
    case SecretOfFirst::kNone:
      return cat("rank 0 has no DS_JOB_SECRET, and this rank has one. ", kOneSecret);
    case SecretOfFirst::kAnother:
      return has_secret ? cat("rank 0 has another DS_JOB_SECRET than this rank. ", kOneSecret)
                        : cat("the job at the meeting place has a secret (DS_JOB_SECRET), and this process was started "
                              "without it. ",
                              kOneSecret);
    case SecretOfFirst::kUnsaid:
    case SecretOfFirst::kSame:
      break;
  }
  return "";
}

// Returns what is known of secrets where ranks did not come.
std::string secrets_after(const Coming& coming) {
  if (!coming.outside) return "";
  try {
    if (coming.rank != 0) {
      const auto first = secret_of_first(*coming.outside, coming.secret, milliseconds(0));
      const std::string difference = difference_of_secrets(first, coming.secret.has_value());
      if (!difference.empty()) return "; " + difference;
    } else if (const std::string stranger = take_stranger(*coming.outside); !stranger.empty()) {
      return cat("; a process at ", stranger, " came, with another DS_JOB_SECRET than this rank or without one");
    }
  } catch (const std::exception&) {  // that it does not answer is said already
    return "";
  }
  return coming.secret ? "; ranks without this rank's DS_JOB_SECRET do not count" : "";
}

[[noreturn]] void fail_waiting(const std::string& cause, const std::string& who, const Coming& coming,
                               milliseconds waited, milliseconds timeout) {
  const int world_size = coming.world_size;
  // The store failed before the time was up, or went away.
  if (waited < timeout - timeout / 10) {
    throw CommError(cat("rendezvous: this rank waited ", waited.count(), " ms for all of ", world_size,
                        " ranks, then the store failed: ", cause, "; ", who));
  }
  throw CommError(cat("rendezvous: not all of ", world_size, " ranks came within ", timeout.count(), " ms; ", who,
                      secrets_after(coming),
                      ". Look whether those processes were started, with the same MASTER_ADDR and MASTER_PORT"));
}

// `left`: what is left of `timeout`.
std::vector<RankPlace> await_all(c10d::Store& store, const Coming& coming, milliseconds left, milliseconds timeout) {
  const int world_size = coming.world_size;
  const Secret& secret = coming.secret;
  std::vector<std::string> keys;
  for (int r = 0; r < world_size; ++r) keys.push_back(arrival_key(r));
  const auto begin = Clock::now();
  std::vector<RankPlace> ranks;
  try {
    store.wait(keys, left);
    for (int r = 0; r < world_size; ++r) {
      ranks.push_back(read_arrival(store.get_to_str(keys[r]), r, world_size, secret));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
    const std::string cause = without_stack(error.what());
    fail_waiting(cause, ranks_after(cause, store, world_size, secret), coming, waited + (timeout - left), timeout);
  }
  return ranks;
}

[[noreturn]] void fail_coming(int rank, const std::exception& error) {
  throw CommError(cat("rendezvous: rank ", rank, " came to the store, which does not answer (",
                      without_stack(error.what()), "): ", kStoreEnded));
}

Rendezvous meet(const c10::intrusive_ptr<c10d::Store>& store, const Coming& coming, Clock::time_point start,
                milliseconds timeout) {
  const int rank = coming.rank;
  const int world_size = coming.world_size;
  const Secret& secret = coming.secret;
  const RankPlace place{host_name(), ::getpid(), shared_memory_domain(), coming.address};
  auto meeting = c10::make_intrusive<c10d::PrefixStore>("rendezvous", store);
  store->setTimeout(timeout);
  note_joined();
  const QuietStore quiet;  // waits at most until the others have come, or rank 0 has ended
  try {
    arrive(*meeting, place, rank, world_size, secret);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail_coming(rank, error);
  }
  const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  const auto left = std::max(timeout - spent, std::chrono::milliseconds(1));
  Rendezvous result{.store = store,
                    .has_secret = secret.has_value(),
                    .rank = rank,
                    .world_size = world_size,
                    .ranks = {},
                    .timeout = timeout};
  result.ranks = await_all(*meeting, coming, left, timeout);
  for (const auto& host : result.hosts()) {
    const auto own = std::find(host.begin(), host.end(), rank);
    if (own == host.end()) continue;
    result.local_rank = static_cast<int>(own - host.begin());
    result.local_world_size = static_cast<int>(host.size());
  }
  return result;
}

constexpr milliseconds kRankZeroSpeaks{5000};

// Said once, by rank 0, where others than this machine's processes may come.
void tell_that_there_is_none(const RendezvousAddress& address) {
  if (is_loopback(address.host)) return;
  log::info("this job has no secret (", kJobSecretVariable, " is not set): whoever reaches ", address.host, ":",
            address.port, " may come in its place. ds-launch makes one; with srun, mpirun or torchrun set it for all ",
            "ranks, as docs/security.md says");
}

// Why this rank, not the first one, is to stay outside; empty: it is not, as far as is known. Then it has left its
// place.
std::string why_outside(const Coming& coming, const RendezvousAddress& address, milliseconds timeout) {
  // Where rank 0 listens it is there, and says it at once. Where torchrun does, it may come much later.
  const milliseconds limit = address.rank_zero_listens ? std::min(timeout, kRankZeroSpeaks) : milliseconds(0);
  const auto first = secret_of_first(*coming.outside, coming.secret, limit);
  const std::string why = difference_of_secrets(first, coming.secret.has_value());
  if (why.empty()) return why;
  const RankPlace place{host_name(), ::getpid(), {}, coming.address};
  leave_place(*coming.outside, arrival_text(place, coming.rank, coming.world_size, {}));
  return why;
}

// Over a store that anybody may reach who reaches its port.
Rendezvous meet_by_port(const RendezvousAddress& address, Clock::time_point start, milliseconds timeout) {
  Coming coming{.rank = address.rank,
                .world_size = address.world_size,
                .address = {},
                .secret = JobSecret::from_environment(process_environment),
                .outside = open_tcp_store(address, timeout)};
  coming.address = address_towards(address.host);
  std::string why;
  try {
    const QuietStore quiet;
    if (address.rank == 0) {
      say_which_secret(*coming.outside, coming.secret);
    } else {
      why = why_outside(coming, address, timeout);
    }
  } catch (const std::exception& error) {
    fail_coming(address.rank, error);
  }
  require<CommError>(why.empty(), "rendezvous: rank ", address.rank, ": ", why);
  if (coming.secret) {
    const std::string prefix = coming.secret->key_prefix();
    return meet(c10::make_intrusive<c10d::PrefixStore>(prefix, coming.outside), coming, start, timeout);
  }
  if (address.rank == 0) tell_that_there_is_none(address);
  return meet(coming.outside, coming, start, timeout);
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
      result = meet_by_port(address, start, options.timeout);
      break;
    case MeetingPlace::kFile:
      result = meet(open_file_store(address), {.rank = address.rank, .world_size = address.world_size}, start,
                    options.timeout);
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
  return meet(store, {.rank = rank, .world_size = world_size}, Clock::now(), timeout);
}

}  // namespace ds::comm
