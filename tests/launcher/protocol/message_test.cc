#include "launcher/protocol/message.h"

#include <gmock/gmock.h>

#include "core/check.h"
#include "launcher/protocol/node_protocol.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Message kMessage{.kind = MessageKind::kLine, .fields = {"1", std::string("a\0\n\xff", 4), ""}};

TEST(Message, ComesThroughInAnyPieces) {
  const std::string bytes = "login text" + std::string(kGreeting) + encode(kMessage) + encode({});
  for (size_t piece = 1; piece < bytes.size(); ++piece) {
    MessageReader reader(false);
    std::vector<Message> messages;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      reader.feed(std::string_view(bytes).substr(at, piece));
      while (const std::optional<Message> message = reader.next()) messages.push_back(*message);
    }
    EXPECT_TRUE(reader.greeted());
    EXPECT_THAT(messages, ElementsAre(kMessage, Message{})) << piece;
  }
}

TEST(Message, NothingIsReadBeforeTheGreeting) {
  MessageReader reader(false);
  reader.feed(encode(kMessage));
  EXPECT_EQ(reader.next(), std::nullopt);
  EXPECT_FALSE(reader.greeted());
}

TEST(Message, OtherBytesAreRefused) {
  for (const std::string& bytes : {std::string("\0\0\0\0", 4), std::string("\1\0\0\0\xff", 5), std::string("hello"),
                                   std::string("\4\0\0\0\0abc", 8)}) {
    MessageReader reader(true);
    reader.feed(bytes);
    EXPECT_THAT(test::thrown_by<Error>([&] { reader.next(); }), HasSubstr("no message of ds-launch"));
  }
}

TEST(NodeProtocol, ComesBackAsItWas) {
  const CheckRequest request = check_request(to_message(CheckRequest{.folder = "/f",
                                                                     .host = "h",
                                                                     .first = true,
                                                                     .slots = {0, 3},
                                                                     .master_addr = "::1",
                                                                     .link_timeout = 2.5,
                                                                     .pid_file = "p",
                                                                     .words = {"--", "x", ""},
                                                                     .environment = {"A=1\n2"}}));
  EXPECT_EQ(request.folder + request.host + request.master_addr + request.pid_file, "/fh::1p");
  EXPECT_TRUE(request.first);
  EXPECT_THAT(request.slots, ElementsAre(0, 3));
  EXPECT_EQ(request.link_timeout, 2.5);
  EXPECT_THAT(request.words, ElementsAre("--", "x", ""));
  EXPECT_THAT(request.environment, ElementsAre("A=1\n2"));

  const CheckReply reply = check_reply(to_message(CheckReply{.launcher_hash = "l",
                                                             .program_hash = "p",
                                                             .program = "/x",
                                                             .address = "10.0.0.1",
                                                             .port = 29500,
                                                             .exit_code = 127,
                                                             .problems = {"a", "b"},
                                                             .notes = {"n"}}));
  EXPECT_EQ(reply.launcher_hash + reply.program_hash + reply.program + reply.address, "lp/x10.0.0.1");
  EXPECT_EQ(reply.port, 29500);
  EXPECT_EQ(reply.exit_code, 127);
  EXPECT_THAT(reply.problems, ElementsAre("a", "b"));
  EXPECT_THAT(reply.notes, ElementsAre("n"));

  const StartRequest start = start_request(to_message(
      StartRequest{.node = 1, .nodes = 2, .first_rank = 4, .world_size = 8, .master_addr = "m", .master_port = 1}));
  EXPECT_EQ(start.node * 1000 + start.nodes * 100 + start.first_rank * 10 + start.world_size, 1248);
  EXPECT_EQ(start.master_addr, "m");
  EXPECT_EQ(start.master_port, 1);

  const FailureMessage failure =
      failure_message(to_message(FailureMessage{.exit_code = 137, .when = int64_t{1} << 60, .lines = {"x", "y"}}));
  EXPECT_EQ(failure.exit_code, 137);
  EXPECT_EQ(failure.when, int64_t{1} << 60);
  EXPECT_THAT(failure.lines, ElementsAre("x", "y"));
}

TEST(NodeProtocol, OtherShapesAreRefused) {
  EXPECT_THAT(test::thrown_by<Error>([] { start_request({.kind = MessageKind::kStart, .fields = {"1"}}); }),
              HasSubstr("too short"));
  EXPECT_THAT(test::thrown_by<Error>([] { start_request({.kind = MessageKind::kStart, .fields = {"one"}}); }),
              HasSubstr("'one' for a number"));
}

TEST(ClockDifference, TheShortestRoundTripCounts) {
  ClockDifference clock;
  clock.take(1000, 51500, 2000);  // ahead by 50000, told with a delay of 500 each way
  EXPECT_EQ(clock.here(51500), 1500);
  clock.take(3000, 53900, 4000);  // as long: not better
  EXPECT_EQ(clock.here(51500), 1500);
  clock.take(5000, 55060, 5100);  // shorter
  EXPECT_EQ(clock.here(55060), 5050);
  EXPECT_EQ(clock.there(5050), 55060);
}

}  // namespace
}  // namespace ds::launcher
