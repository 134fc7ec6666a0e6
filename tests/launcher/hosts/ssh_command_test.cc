#include "launcher/hosts/ssh_command.h"

#include <gmock/gmock.h>

namespace ds::launcher {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(SshCommand, NeverAsksAndHasLimits) {
  EXPECT_THAT(ssh_command({.port = 2222, .more_words = "-i 'my key'", .connect_timeout = 2.5, .link_timeout = 30},
                          "node1", "exec x"),
              ElementsAre("ssh", "-i", "my key", "-p", "2222", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o",
                          "ConnectTimeout=3", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", "-x", "-T",
                          "--", "node1", "exec x"));
  EXPECT_THAT(ssh_command({.port = {}, .more_words = "", .connect_timeout = 5, .link_timeout = 0}, "node1", "exec x"),
              Not(Contains(HasSubstr("ServerAlive"))));
}

TEST(SshCommand, SaysWhatToDo) {
  const auto advice = [](const char* said) { return ssh_advice({said}, "ssh h true"); };
  EXPECT_THAT(advice("Host key verification failed."), HasSubstr("run `ssh h true` once"));
  EXPECT_THAT(advice("me@h: Permission denied (publickey)."), HasSubstr("ssh-copy-id"));
  EXPECT_THAT(advice("ssh: Could not resolve hostname h: Name or service not known"), HasSubstr("the name is unknown"));
  EXPECT_THAT(advice("ssh: connect to host h port 22: Connection refused"), HasSubstr("--ssh_port"));
  EXPECT_THAT(advice("ssh: connect to host h port 22: Connection timed out"), HasSubstr("is it running"));
}

}  // namespace
}  // namespace ds::launcher
