#include "launcher/protocol/node_link.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <csignal>

#include "core/unique_fd.h"

namespace ds::launcher {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// What the first ds-launch says goes into a pipe; times are made up.
class NodeLinkSilence : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    reader_ = UniqueFd(ends[0]);
    writer_ = UniqueFd(ends[1]);
    link_.emplace(reader_.get(), console_);
    link_->limit_silence(10, start_);
  }
  void say(const Message& message) {
    const std::string bytes = encode(message);
    ASSERT_EQ(write(writer_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  bool lost_after(int count) {
    EXPECT_THAT(link_->read(start_ + seconds(count)), IsEmpty());
    return link_->lost();
  }

  const NodeLink::Clock::time_point start_ = NodeLink::Clock::now();
  NodeConsole console_;
  UniqueFd reader_, writer_;
  std::optional<NodeLink> link_;
};

TEST_F(NodeLinkSilence, EndsTheConnectionAfterTheLimit) {
  EXPECT_FALSE(lost_after(9));
  say({.kind = MessageKind::kAlive, .fields = {}});
  EXPECT_FALSE(lost_after(10));
  EXPECT_EQ(link_->silence_deadline(), start_ + seconds(20));
  EXPECT_FALSE(lost_after(19));
  EXPECT_TRUE(lost_after(20));
  EXPECT_EQ(link_->silence_deadline(), std::nullopt);
}

TEST_F(NodeLinkSilence, IsNoneWhenWordsCameWhileTheNodeWasAway) {
  say({.kind = MessageKind::kAlive, .fields = {}});
  say({.kind = MessageKind::kKill, .fields = {"why"}});
  EXPECT_THAT(link_->read(start_ + seconds(1000)), ElementsAre(Message{.kind = MessageKind::kKill, .fields = {"why"}}));
  EXPECT_FALSE(link_->lost());
  EXPECT_TRUE(lost_after(1010));
}

TEST_F(NodeLinkSilence, IsMeasuredAgainOnceByANodeThatWasAway) {
  EXPECT_FALSE(lost_after(1000));
  EXPECT_FALSE(lost_after(1009));
  EXPECT_TRUE(lost_after(2000));
}

TEST_F(NodeLinkSilence, HasNoLimitWhileTheRanksAreStopped) {
  say({.kind = MessageKind::kSignal, .fields = {std::to_string(SIGSTOP)}});
  EXPECT_EQ(link_->read(start_ + seconds(1)).size(), 1U);
  EXPECT_EQ(link_->silence_deadline(), std::nullopt);
  EXPECT_FALSE(lost_after(1000));
  say({.kind = MessageKind::kAlive, .fields = {}});
  EXPECT_FALSE(lost_after(1001));
  EXPECT_TRUE(lost_after(1011));
}

TEST_F(NodeLinkSilence, TheEndOfTheStreamEndsTheConnectionAtOnce) {
  writer_.reset();
  EXPECT_TRUE(lost_after(0));
}

}  // namespace
}  // namespace ds::launcher
