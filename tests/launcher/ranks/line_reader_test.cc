#include "launcher/ranks/line_reader.h"

#include <gmock/gmock.h>

#include <vector>

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

class LineReaderTest : public ::testing::Test {
 protected:
  void feed(std::string_view bytes) {
    reader_.feed(bytes, [this](std::string_view line) { lines_.emplace_back(line); });
  }
  void finish() {
    reader_.finish([this](std::string_view line) { lines_.emplace_back(line); });
  }
  LineReader reader_;
  std::vector<std::string> lines_;
};

TEST_F(LineReaderTest, JoinsPieces) {
  feed("ab");
  feed("c\nde");
  feed("\n\nf");
  EXPECT_THAT(lines_, ElementsAre("abc", "de", ""));
  finish();
  EXPECT_THAT(lines_, ElementsAre("abc", "de", "", "f"));
}

TEST_F(LineReaderTest, GivesTheLastDrawingOfALine) {
  feed("10 %\r20 %\n");
  feed("30 %\r");
  feed("40 %");
  feed("\r\n");
  feed("dos\r\n");
  EXPECT_THAT(lines_, ElementsAre("20 %", "40 %", "dos"));
}

TEST_F(LineReaderTest, CutsALineThatNeverEnds) {
  feed(std::string(kLongestLine + 5, 'x'));
  ASSERT_THAT(lines_, SizeIs(1));
  EXPECT_THAT(lines_[0], SizeIs(kLongestLine));
  feed("\n");
  EXPECT_EQ(lines_[1], "xxxxx");
}

TEST_F(LineReaderTest, AProgressLineWithoutEndDoesNotGrow) {
  for (int step = 0; step < 300000; ++step) feed("\r12345678");
  finish();
  EXPECT_THAT(lines_, ElementsAre("12345678"));
}

TEST(LastLines, KeepsTwenty) {
  LastLines last;
  for (int line = 0; line < 50; ++line) last.add(std::to_string(line));
  ASSERT_THAT(last.lines(), SizeIs(20));
  EXPECT_EQ(last.lines().front(), "30");
  EXPECT_EQ(last.lines().back(), "49");
}

TEST(LastLines, LinesOfAProgramAboutFramesStay) {
  LastLines last;
  const std::vector<std::string> own = {"frame #12 dropped by the camera", "frame #12: 40 objects",
                                        "frame #12: loss 3 + 0x9c", "frame #7: at + 0x1c (0x7f00 in)",
                                        "frame #: f() + 0x1c (0x7f00 in libc.so)"};
  for (const std::string& line : own) last.add(line);
  last.add("  frame #3: std::function<void ()>::operator()() const + 0x1c (0x7f00 in /a b/libtorch.so)");
  EXPECT_THAT(last.lines(), ::testing::ElementsAreArray(own));
  EXPECT_EQ(last.frames(), 1U);
}

}  // namespace
}  // namespace ds::launcher
