// The host is a script in place of ssh, which answers as a ds-launch does.
#include "launcher/hosts/away_hosts.h"

#include <fcntl.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/unique_fd.h"
#include "launcher/hosts/host_start.h"
#include "launcher/protocol/message.h"
#include "tests/support/scratch_folder.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;

constexpr std::chrono::seconds kPatience(60);

TEST(AwayHosts, AHostThatIsReadyAgain) {
  const test::ScratchFolder folder;
  const std::vector<std::string> environment = {"PATH=" + folder.path().string() + ":/usr/bin:/bin"};
  Options options;
  options.program = "./train";
  options.min_nodes = 1;
  const Host host{.name = "b", .slots = {0}};
  HostMembers members;
  members.emplace_back().host = host;
  const std::string question = encode(to_message(request_for_host(members, 0, options, environment)));
  const CheckReply reply{.launcher_hash = "right", .program_hash = "same"};
  folder.write("answer", std::string(kGreeting) + encode(to_message(reply)));
  const std::string ssh = folder.write("ssh", cat("#!/bin/sh\nhead -c ", question.size(), " >", folder / "asked",
                                                  "\ncat ", folder / "answer", "\nexec sleep 60\n"));
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);

  options.master_addr = "10.0.0.1";                          // of the first host, not of this one
  const OwnProgram own{"/ds-launch/that/is/gone", "right"};  // an installation has replaced it
  const UniqueFd nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
  Console console(nowhere.get(), nowhere.get());
  Notices notices(console, Verbosity::kError);
  AskIntervals intervals;
  AwayHosts away(options, environment, own, intervals, notices);
  away.add(host);
  std::vector<std::string> ready;
  for (const auto limit = AwayHosts::Clock::now() + kPatience; ready.empty() && AwayHosts::Clock::now() < limit;) {
    std::vector<pollfd> waits;
    away.append_waits(waits);
    poll(waits.data(), waits.size(), 10);
    ready = away.look("same");
  }
  EXPECT_THAT(ready, ElementsAre("b"));
  std::ifstream asked(folder / "asked", std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(asked), {}), question);
  EXPECT_TRUE(away.still_away().empty());

  const auto before = AwayHosts::Clock::now();
  away.add(host);  // it was not used
  EXPECT_GE(*away.next_time() - before, std::chrono::seconds(6));
}

}  // namespace
}  // namespace ds::launcher
