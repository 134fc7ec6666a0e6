#include "launcher/command_line/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace ds::launcher {
namespace {

TEST(OpenLine, KnowsWhatStandsOnTheLine) {
  OpenLine line;
  EXPECT_FALSE(line.open());
  line.feed("done\nhalf");
  EXPECT_EQ(line.redraw(), "half");
  line.feed(" more");
  EXPECT_EQ(line.redraw(), "half more");
  line.feed("\r10 %");
  EXPECT_EQ(line.redraw(), "10 %");
  line.feed("\r");
  EXPECT_EQ(line.redraw(), "10 %\r");
  line.feed("20 %\r");
  EXPECT_EQ(line.redraw(), "20 %\r");
  line.feed("\n");
  EXPECT_FALSE(line.open());
}

class ConsoleOnPipe : public ::testing::Test {
 protected:
  ConsoleOnPipe() {
    EXPECT_EQ(pipe(ends_), 0);
    fcntl(ends_[0], F_SETFL, O_NONBLOCK);
    signal(SIGPIPE, SIG_IGN);
  }
  ~ConsoleOnPipe() override {
    close(ends_[0]);
    close(ends_[1]);
  }
  std::string read_all() {
    std::string text;
    char buffer[8192];
    for (ssize_t got; (got = read(ends_[0], buffer, sizeof(buffer))) > 0;)
      text.append(buffer, static_cast<size_t>(got));
    return text;
  }
  int ends_[2] = {-1, -1};
};

TEST_F(ConsoleOnPipe, EndsAnOpenLineBeforeAnother) {
  Console console(ends_[1], ends_[1]);
  EXPECT_TRUE(console.same_device());
  console.raw(Console::kOut, "10 %\r");
  console.line(Console::kErr, "news");
  console.raw(Console::kOut, "20 %\n");
  console.line(Console::kErr, "more");
  EXPECT_EQ(read_all(), "10 %\r\nnews\n20 %\nmore\n");
}

TEST_F(ConsoleOnPipe, QueuesForASlowReaderWithoutWaiting) {
  Console console(ends_[1], ends_[1]);
  const std::string line(999, 'x');
  size_t lines = 0;
  while (!console.backed_up()) {
    console.line(Console::kOut, line);
    ++lines;
  }
  std::string text;
  std::vector<pollfd> waits;
  do {
    text += read_all();
    console.write_some();
    waits.clear();
    console.append_waits(waits);
  } while (!waits.empty());
  text += read_all();
  EXPECT_EQ(text.size(), lines * 1000);
  EXPECT_FALSE(console.backed_up());
}

TEST_F(ConsoleOnPipe, DropsOutputThatNobodyCanRead) {
  Console console(ends_[1], ends_[1]);
  close(ends_[0]);
  ends_[0] = open("/dev/null", O_RDONLY);
  console.line(Console::kOut, "lost");
  EXPECT_TRUE(console.lost(Console::kOut));
  console.finish(10);
  EXPECT_FALSE(console.backed_up());
}

}  // namespace
}  // namespace ds::launcher
