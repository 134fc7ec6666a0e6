// The ds-launch of one host among many: how it ends, and what it tells the first one.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/unique_fd.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/lost_link_text.h"
#include "launcher/protocol/node_protocol.h"
#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::Contains;
using ::testing::Not;

// The test is the first ds-launch: it asks for one rank, and says no more.
class LaunchNode : public ::testing::Test {
 protected:
  int ends_with(double link_timeout, const std::vector<std::string>& actions) {
    const std::string orders = folder_ / "orders";
    EXPECT_EQ(mkfifo(orders.c_str(), 0600), 0);
    const UniqueFd writer(open(orders.c_str(), O_RDWR | O_CLOEXEC));
    Launched launched({.flags = {std::string(kNodeFlag)}, .program = {}, .input = orders});
    CheckRequest request{.folder = folder_.path().string(),
                         .host = "here",
                         .slots = {0},
                         .link_timeout = link_timeout,
                         .words = {"--standalone", "--", DS_RANK_PROGRAM}};
    request.words.insert(request.words.end(), actions.begin(), actions.end());
    const std::string bytes = encode(to_message(request)) +
                              encode(to_message(StartRequest{.master_addr = "127.0.0.1", .master_port = 29500}));
    EXPECT_EQ(write(writer.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    const int code = launched.wait();
    MessageReader reader(false);
    reader.feed(launched.out());
    while (std::optional<Message> message = reader.next()) said_.push_back(std::move(*message));
    return code;
  }

  TemporaryFolder folder_;
  std::vector<Message> said_;
};

TEST_F(LaunchNode, TellsTheExitCodeOfItsRanks) {
  EXPECT_EQ(ends_with(60, {"print", "hello"}), 0);
  EXPECT_THAT(said_, Contains(Message{.kind = MessageKind::kEnded, .fields = {"0"}}));
}

TEST_F(LaunchNode, DoesNotEndWellWhenItHearsNothing) {
  EXPECT_EQ(ends_with(0.2, {"touch", folder_ / "pid", "pause"}), kLinkLostCode);
  EXPECT_THAT(said_, Contains(::testing::Field(&Message::kind, MessageKind::kChecked)));
  EXPECT_THAT(said_, Not(Contains(::testing::Field(&Message::kind, MessageKind::kEnded))));
}

}  // namespace
}  // namespace ds::launcher::testing
