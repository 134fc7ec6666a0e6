// How ranks meet: what the address and the environment say, and the meeting itself between threads.
#include "comm/meeting/rendezvous.h"

#include <arpa/inet.h>
#include <c10/util/Logging.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/meeting/quiet_store.h"
#include "comm/meeting/rendezvous_address.h"
#include "comm/meeting/strangers.h"
#include "comm/meeting/tcp_meeting.h"
#include "core/check.h"
#include "tests/support/store_threads.h"
#include "tests/support/thrown.h"

namespace ds::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

RendezvousAddress parse(const std::string& init_method, const Variables& variables) {
  return parse_rendezvous(init_method, [&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

template <class E>
std::string error_of(const std::function<void()>& call) {
  return test::thrown_by<E>(call);
}

std::string refusal_of(const std::string& init_method, const Variables& variables = {}) {
  return error_of<ConfigError>([&] { parse(init_method, variables); });
}

const Variables kComplete = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29500"}};

Variables with(const char* name, const char* value) {
  Variables variables = kComplete;
  variables[name] = value;
  return variables;
}

Variables without(const char* name) {
  Variables variables = kComplete;
  variables.erase(name);
  return variables;
}

TEST(RendezvousAddress, TheEnvironmentOfALauncher) {
  const RendezvousAddress address = parse("env://", kComplete);
  EXPECT_EQ(address.place, MeetingPlace::kTcp);
  EXPECT_EQ(address.rank, 3);
  EXPECT_EQ(address.world_size, 8);
  EXPECT_EQ(address.local_rank, 1);
  EXPECT_EQ(address.local_world_size, 2);
  EXPECT_EQ(address.host, "node0");
  EXPECT_EQ(address.port, 29500);
}

TEST(RendezvousAddress, WithoutALauncherAProcessIsAlone) {
  EXPECT_EQ(parse("env://", {}).place, MeetingPlace::kAlone);
  EXPECT_EQ(parse("env://", {{"MASTER_ADDR", "node0"}}).place, MeetingPlace::kAlone);
  EXPECT_EQ(parse("env://", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}).place, MeetingPlace::kAlone);
}

TEST(RendezvousAddress, MissingVariablesAreNamed) {
  for (const char* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_THAT(refusal_of("env://", without(name)),
                AllOf(HasSubstr(cat("but ", name, " is missing")), HasSubstr("ds-launch")));
  }
  EXPECT_THAT(refusal_of("env://", {{"LOCAL_RANK", "0"}}), HasSubstr("RANK, WORLD_SIZE is missing"));
}

TEST(RendezvousAddress, BadNumbersAreNamedWithWhatWasFound) {
  EXPECT_THAT(refusal_of("env://", with("RANK", "two")),
              AllOf(HasSubstr("RANK"), HasSubstr("integer"), HasSubstr("'two'")));
  EXPECT_THAT(refusal_of("env://", with("RANK", "8")), AllOf(HasSubstr("[0, 8)"), HasSubstr("found 8")));
  EXPECT_THAT(refusal_of("env://", with("RANK", "-1")), HasSubstr("found -1"));
  EXPECT_THAT(refusal_of("env://", with("WORLD_SIZE", "0")), HasSubstr("world size of at least 1, found 0"));
  EXPECT_THAT(refusal_of("env://", with("WORLD_SIZE", "8x")), AllOf(HasSubstr("WORLD_SIZE"), HasSubstr("'8x'")));
  EXPECT_THAT(refusal_of("env://", with("LOCAL_RANK", "2")), AllOf(HasSubstr("LOCAL_RANK"), HasSubstr("found 2")));
  EXPECT_THAT(refusal_of("env://", with("LOCAL_WORLD_SIZE", "9")),
              AllOf(HasSubstr("LOCAL_WORLD_SIZE"), HasSubstr("found 9")));
  EXPECT_THAT(refusal_of("env://", with("MASTER_PORT", "70000")),
              AllOf(HasSubstr("MASTER_PORT"), HasSubstr("found 70000")));
}

TEST(RendezvousAddress, TcpAndFileTakeTheRestFromTheEnvironment) {
  const RendezvousAddress tcp = parse("tcp://node7:1234?rank=1&world_size=4", kComplete);
  EXPECT_EQ(tcp.place, MeetingPlace::kTcp);
  EXPECT_EQ(tcp.host, "node7");
  EXPECT_EQ(tcp.port, 1234);
  EXPECT_EQ(tcp.rank, 1);
  EXPECT_EQ(tcp.world_size, 4);
  EXPECT_EQ(parse("tcp://[::1]:1234?world_size=4", kComplete).host, "::1");
  EXPECT_EQ(parse("tcp://node7:1234?world_size=4", kComplete).rank, 3);
  const RendezvousAddress file = parse("file:///shared/meeting?rank=0", kComplete);
  EXPECT_EQ(file.place, MeetingPlace::kFile);
  EXPECT_EQ(file.path, "/shared/meeting");
  EXPECT_EQ(file.world_size, 8);
}

TEST(RendezvousAddress, MalformedAddressesAreQuoted) {
  EXPECT_THAT(refusal_of("http://node0"),
              AllOf(HasSubstr("env://, tcp://host:port or file:///path"), HasSubstr("'http://node0'")));
  EXPECT_THAT(refusal_of("tcp://node0", kComplete), HasSubstr("found no port"));
  EXPECT_THAT(refusal_of("tcp://node0:0", kComplete), HasSubstr("port in [1, 65535], found 0"));
  EXPECT_THAT(refusal_of("tcp://node0:1?rnk=2", kComplete), HasSubstr("found 'rnk=2'"));
  EXPECT_THAT(refusal_of("tcp://node0:1?rank=0"), AllOf(HasSubstr("world_size"), HasSubstr("WORLD_SIZE")));
  EXPECT_THAT(refusal_of("file://meeting", kComplete), HasSubstr("absolute path"));
}

// A TCP port of the loopback interface; in use by this process from listen() on.
class Port {
 public:
  Port() : descriptor_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int yes = 1;
    ::setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(descriptor_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    number_ = ntohs(address.sin_port);
  }
  ~Port() { release(); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  int number() const { return number_; }
  void listen() const { EXPECT_EQ(::listen(descriptor_, 1), 0); }
  int release() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
    return number_;
  }

 private:
  int descriptor_;
  int number_ = 0;
};

std::string tcp(int port, int rank, int world) {
  return cat("tcp://127.0.0.1:", port, "?rank=", rank, "&world_size=", world);
}

void expect_met(const Rendezvous& meeting, int rank, int world) {
  EXPECT_EQ(meeting.rank, rank);
  EXPECT_EQ(meeting.world_size, world);
  EXPECT_EQ(meeting.local_rank, rank);
  EXPECT_EQ(meeting.local_world_size, world);
  ASSERT_EQ(static_cast<int>(meeting.ranks.size()), world);
  EXPECT_EQ(meeting.hosts().size(), 1U);
  for (const RankPlace& place : meeting.ranks) EXPECT_EQ(place.process, ::getpid());
  // The store is shared.
  meeting.store->set(cat("from ", rank), cat(rank));
  const std::string next = cat((rank + 1) % world);
  EXPECT_EQ(meeting.store->get_to_str(cat("from ", next)), next);
}

TEST(Rendezvous, OverTcp) {
  const int port = Port().release();
  ds::testing::on_store_threads(3, [&](const auto& together, int rank) {
    const Rendezvous meeting = rendezvous({.init_method = tcp(port, rank, 3), .timeout = seconds(30)});
    expect_met(meeting, rank, 3);
    // Rank 0 keeps the store open until the others have read from it.
    together->set(cat("done ", rank), std::string("yes"));
    if (rank == 0) together->wait({"done 1", "done 2"}, seconds(30));
  });
}

TEST(Rendezvous, OverAFile) {
  const std::string path =
      (std::filesystem::path(::testing::TempDir()) / cat("dsengine-meeting-", ::getpid())).string();
  std::filesystem::remove(path);
  ds::testing::on_store_threads(3, [&](const auto& together, int rank) {
    const Rendezvous meeting =
        rendezvous({.init_method = cat("file://", path, "?rank=", rank, "&world_size=3"), .timeout = seconds(30)});
    expect_met(meeting, rank, 3);
    together->set(cat("done ", rank), std::string("yes"));
    together->wait({"done 0", "done 1", "done 2"}, seconds(30));
  });
  std::filesystem::remove(path);
}

TEST(Rendezvous, OverAStoreThatExists) {
  ds::testing::on_store_threads(
      3, [](const auto& store, int rank) { expect_met(rendezvous(store, rank, 3, seconds(30)), rank, 3); });
}

TEST(Rendezvous, AFolderThatCannotBeWrittenIsNamed) {
  EXPECT_THAT(
      error_of<ConfigError>([] {
        rendezvous({.init_method = "file:///nowhere/at/all/meeting?rank=0&world_size=2", .timeout = seconds(1)});
      }),
      AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("No such file")));
}

TEST(Rendezvous, AMissingRankIsNamedAtTheTimeLimit) {
  const auto start = std::chrono::steady_clock::now();
  ds::testing::on_store_threads(4, [](const auto& store, int rank) {
    if (rank == 2) return;
    EXPECT_THAT(error_of<CommError>([&] { rendezvous(store, rank, 4, milliseconds(400)); }),
                AllOf(HasSubstr("not all of 4 ranks came within 400 ms"), HasSubstr("missing: rank 2; present: "),
                      HasSubstr(cat(rank, " (")), HasSubstr(cat("pid ", ::getpid()))));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
}

TEST(Rendezvous, AMissingRankIsNamedOverTcp) {
  const int port = Port().release();
  ds::testing::on_store_threads(2, [&](const auto& together, int rank) {
    EXPECT_THAT(error_of<CommError>([&] { rendezvous({.init_method = tcp(port, rank, 3), .timeout = seconds(1)}); }),
                ::testing::AnyOf(HasSubstr("missing: rank 2; present: 0 ("),
                                 AllOf(HasSubstr("the store does not answer any more"), HasSubstr("rank 0"))));
  });
}

// A store whose connection breaks once, and answers again.
struct BreakingStore : c10d::HashStore {
  using c10d::HashStore::wait;
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    c10d::HashStore::wait(keys.size() > 1 ? std::vector<std::string>{keys[0]} : keys, timeout);
    if (keys.size() > 1) throw std::runtime_error("Connection reset by peer");
  }
};

TEST(Rendezvous, AStoreThatFailsEarlySaysWhy) {
  EXPECT_THAT(error_of<CommError>([] { rendezvous(c10::make_intrusive<BreakingStore>(), 0, 2, seconds(30)); }),
              AllOf(::testing::ContainsRegex("waited [0-9]+ ms for all of 2 ranks, then the store failed: "),
                    HasSubstr("failed: Connection reset by peer; missing: rank 1; present: 0 (")));
}

TEST(QuietStore, GivesTheLevelBackUnlessItIsSomebodyElsesByThen) {
  const int before = FLAGS_caffe2_log_level;
  {
    const QuietStore one;
    const QuietStore two;
    EXPECT_EQ(FLAGS_caffe2_log_level, std::max(before, 2));
  }
  EXPECT_EQ(FLAGS_caffe2_log_level, before);
  {
    const QuietStore one;
    FLAGS_caffe2_log_level = 3;  // by the program
  }
  EXPECT_EQ(FLAGS_caffe2_log_level, 3);
  FLAGS_caffe2_log_level = before;
}

TEST(Rendezvous, RankZeroMissingIsSaidByTheOthers) {
  Port port;  // bound, and nobody listens
  EXPECT_THAT(
      error_of<CommError>([&] { rendezvous({.init_method = tcp(port.number(), 1, 2), .timeout = milliseconds(300)}); }),
      AllOf(HasSubstr("rank 1 of 2"), HasSubstr("300 ms"), HasSubstr("rank 0, which is missing"),
            HasSubstr(cat("127.0.0.1:", port.number()))));
}

TEST(Rendezvous, APortInUseIsNamed) {
  const Port port;
  port.listen();
  EXPECT_THAT(
      error_of<CommError>([&] { rendezvous({.init_method = tcp(port.number(), 0, 2), .timeout = milliseconds(500)}); }),
      AllOf(HasSubstr(cat("rank 0 cannot listen on port ", port.number())), HasSubstr("in use"),
            HasSubstr("--master_port")));
}

TEST(Rendezvous, InTheStoreOfTorchrunsAgent) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const RendezvousAddress address{.place = MeetingPlace::kTcp,
                                  .rank = 0,
                                  .world_size = 2,
                                  .host = "127.0.0.1",
                                  .port = agent->getPort(),
                                  .rank_zero_listens = false,
                                  .prefix = "/worker/attempt_0"};
  open_tcp_store(address, seconds(30))->set("key", std::string("value"));
  EXPECT_EQ(agent->get_to_str("/worker/attempt_0/key"), "value");
}

TEST(Rendezvous, AnUnknownHostIsNamed) {
  EXPECT_THAT(error_of<CommError>([] {
                rendezvous({.init_method = "tcp://no-such-host.invalid:1234?rank=1&world_size=2",
                            .timeout = milliseconds(500)});
              }),
              AllOf(HasSubstr("'no-such-host.invalid'"), HasSubstr("MASTER_ADDR")));
}

TEST(Rendezvous, ARankThatIsClaimedTwiceIsNamed) {
  std::atomic<int> refused{0};
  ds::testing::on_store_threads(2, [&](const auto& store, int) {
    const std::string error = error_of<CommError>([&] { rendezvous(store, 0, 2, milliseconds(500)); });
    if (error.find("claimed twice") != std::string::npos) {
      ++refused;
      EXPECT_THAT(error,
                  AllOf(HasSubstr("rank 0 was claimed twice"), HasSubstr(cat("pid ", ::getpid())), HasSubstr("RANK")));
    } else {
      EXPECT_THAT(error, HasSubstr("missing: rank 1"));
    }
  });
  EXPECT_EQ(refused.load(), 1);
}

TEST(Rendezvous, RanksThatDisagreeOnTheWorldSizeSaySo) {
  ds::testing::on_store_threads(2, [](const auto& store, int rank) {
    EXPECT_THAT(error_of<CommError>([&] { rendezvous(store, rank, 2 + rank, milliseconds(500)); }),
                AllOf(HasSubstr("expects a world of "), HasSubstr("WORLD_SIZE")));
  });
}

TEST(Rendezvous, ARankOutsideTheWorldIsRefused) {
  EXPECT_THAT(error_of<UsageError>([] { rendezvous(nullptr, 2, 2, seconds(1)); }), HasSubstr("found rank 2 of 2"));
}

TEST(Rendezvous, HostsAreGroupedByTheirLowestRank) {
  const Rendezvous meeting{
      .world_size = 4,
      .ranks = {
          {"b", 1, "domain b", ""}, {"a", 2, "domain a", ""}, {"b", 3, "domain b", ""}, {"a", 4, "domain a", ""}}};
  EXPECT_EQ(meeting.hosts(), (std::vector<std::vector<int>>{{0, 2}, {1, 3}}));
  EXPECT_EQ(meeting.descriptions()[2], "b, pid 3");
}

TEST(Strangers, AreToldWhichSecretRankZeroHas) {
  const std::optional<JobSecret> job(JobSecret("0123456789abcdef"));
  const std::optional<JobSecret> other(JobSecret("fedcba9876543210"));
  c10d::HashStore store;
  const auto seen_by = [&](const std::optional<JobSecret>& own) {
    return secret_of_first(store, own, milliseconds(0));
  };
  EXPECT_EQ(seen_by(job), SecretOfFirst::kUnsaid);
  say_which_secret(store, job);
  EXPECT_EQ(seen_by(job), SecretOfFirst::kSame);
  EXPECT_EQ(seen_by(other), SecretOfFirst::kAnother);
  EXPECT_EQ(seen_by(std::nullopt), SecretOfFirst::kAnother);
  say_which_secret(store, std::nullopt);
  EXPECT_EQ(seen_by(job), SecretOfFirst::kNone);
  EXPECT_EQ(seen_by(std::nullopt), SecretOfFirst::kSame);
}

// As where a stranger takes them away between two calls.
class StoreWhoseKeysGo : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>&) override { return true; }
};

TEST(Strangers, WhoTakesAKeyAwayStopsNobody) {
  StoreWhoseKeysGo store;
  store.setTimeout(seconds(600));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(secret_of_first(store, std::nullopt, milliseconds(0)), SecretOfFirst::kUnsaid);
  EXPECT_EQ(take_stranger(store), "an unknown address");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
  EXPECT_EQ(store.getTimeout(), seconds(600));
}

}  // namespace
}  // namespace ds::comm
