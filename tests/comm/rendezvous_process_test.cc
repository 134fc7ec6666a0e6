// env:// between processes, as a launcher starts them.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdlib>

#include "comm/rendezvous.h"
#include "core/check.h"
#include "tests/support/process_ranks.h"

namespace ds::test {
namespace {

using ds::testing::ProcessRank;
using ::testing::AllOf;
using ::testing::HasSubstr;

int free_port() {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(descriptor, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(descriptor);
  return ntohs(address.sin_port);
}

// Sets what ds-launch sets, with a port that the ranks agree on through `meeting`.
void set_environment(const comm::Rendezvous& meeting) {
  if (meeting.rank == 0) meeting.store->set("port", cat(free_port()));
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("RANK", cat(meeting.rank));
  set("WORLD_SIZE", cat(meeting.world_size));
  set("LOCAL_RANK", cat(meeting.rank));
  set("LOCAL_WORLD_SIZE", cat(meeting.world_size));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", meeting.store->get_to_str("port"));
}

DS_PROCESS_TEST(RendezvousProcesses, MeetByTheEnvironment, 3) {
  const comm::Rendezvous file = ranks.meet();
  set_environment(file);
  const comm::Rendezvous meeting = comm::rendezvous({.timeout = std::chrono::seconds(30)});
  EXPECT_EQ(meeting.rank, ranks.rank());
  EXPECT_EQ(meeting.local_rank, ranks.rank());
  EXPECT_EQ(meeting.local_world_size, 3);
  ASSERT_EQ(meeting.ranks.size(), 3U);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(meeting.ranks[r].process, file.ranks[r].process);
  meeting.store->set(cat("from ", ranks.rank()), std::string("here"));
  meeting.store->wait({"from 0", "from 1", "from 2"}, std::chrono::seconds(30));
  // Rank 0's process holds the store, so it ends last.
  file.store->set(cat("read ", ranks.rank()), std::string("yes"));
  if (ranks.rank() == 0) file.store->wait({"read 1", "read 2"}, std::chrono::seconds(30));
}

DS_PROCESS_TEST(RendezvousProcesses, ARankThatDiedBeforeTheMeetingIsNamed, .world_size = 3, .killed = {2}) {
  const comm::Rendezvous file = ranks.meet();
  if (ranks.rank() == 2) ProcessRank::kill_self();
  set_environment(file);
  try {
    comm::rendezvous({.timeout = std::chrono::milliseconds(ranks.rank() == 0 ? 3000 : 1000)});
    ADD_FAILURE() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("not all of 3 ranks came within"), HasSubstr("missing: rank 2; present: ")));
  }
}

}  // namespace
}  // namespace ds::test
