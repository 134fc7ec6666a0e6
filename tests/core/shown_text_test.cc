#include "core/shown_text.h"

#include <gtest/gtest.h>

#include <string>

namespace ds {
namespace {

TEST(ShownText, EscapesWhatATerminalObeys) {
  EXPECT_EQ(shown_text("lr"), "lr");
  EXPECT_EQ(shown_text("a\x1b[31mb\n\tc\x7f"), "a\\x1B[31mb\\n\\tc\\x7F");
  EXPECT_EQ(shown_text(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(shown_text("gr\xC3\xBC\xC3\x9F"), "gr\xC3\xBC\xC3\x9F");
  EXPECT_EQ(shown_text("\xC2\x9B"), "\\xC2\\x9B");  // U+009B begins a control sequence as ESC [ does
  EXPECT_EQ(shown_text("\xff\xC3"), "\\xFF\\xC3");
}

TEST(ShownText, CutsLongTextAtACharacter) {
  EXPECT_EQ(shown_text("abcdef", 6), "abcdef");
  EXPECT_EQ(shown_text("abcdefg", 6), "abc...");
  EXPECT_EQ(shown_text("ab\xC3\xBC"
                       "efg",
                       6),
            "ab...");  // not half of it
  EXPECT_LE(shown_text(std::string(1 << 20, 'x')).size(), kShownBytes);
}

TEST(ShownText, KeepsTheLinesOfAMessage) {
  EXPECT_EQ(shown_message("two\nlines\n\twith a tab\x1b"), "two\nlines\n\twith a tab\\x1B");
  EXPECT_LE(shown_message(std::string(1 << 20, 'x')).size(), kShownLineBytes);
  std::string many;
  for (int i = 0; i < 100'000; ++i) many += "a line\n";
  EXPECT_LT(shown_message(many).size(), kShownMessageBytes + 100);
  EXPECT_EQ(shown_message("").size(), 0U);
}

}  // namespace
}  // namespace ds
