#include "launcher/hosts/lost_link_text.h"

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "launcher/protocol/message.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Why a host is gone whose ssh ended like this shell.
std::string why_after(const std::string& script) {
  HostMember member;
  member.host.name = "node7";
  member.link =
      std::make_unique<HostLink>("/bin/sh", std::vector<std::string>{"sh", "-c", script}, std::vector<std::string>{});
  while (!member.link->over()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  member.link->read(true);
  Options options;
  options.link_timeout_seconds = 20;
  return why_over(member, options, OwnProgram{});
}

const std::string kGreet = "echo; echo ds-launch-node 1; ";

TEST(LostLink, AHostThatHeardNothing) {
  EXPECT_THAT(
      why_after(kGreet + "exit 254"),
      StartsWith("ds-launch there heard nothing from this one for 20 s (--link_timeout) and has ended its ranks"));
}

TEST(LostLink, OtherExitCodes) {
  EXPECT_THAT(why_after(kGreet + "exit 9"), StartsWith("ds-launch there: exit code 9"));
  EXPECT_THAT(why_after(kGreet + "echo Broken >&2; exit 255"), AllOf(StartsWith("ssh: "), HasSubstr("Broken")));
  EXPECT_THAT(why_after("exit 254"), AllOf(HasSubstr("did not answer"), Not(HasSubstr("heard nothing"))));
}

}  // namespace
}  // namespace ds::launcher
