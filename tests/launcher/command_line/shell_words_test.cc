#include "launcher/command_line/shell_words.h"
#include "core/check.h"
#include "tests/support/thrown.h"

#include <gmock/gmock.h>

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ShellWords, QuotesForAShell) {
  EXPECT_EQ(shell_word("/a b/$x"), "'/a b/$x'");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
}

TEST(ShellWords, SplitsWordsAsAShell) {
  EXPECT_THAT(split_words(R"( -o "A B"  -F '/x y'/z a\ b "\"" '' )"),
              ElementsAre("-o", "A B", "-F", "/x y/z", "a b", "\"", ""));
  EXPECT_THAT(split_words(" "), IsEmpty());
  EXPECT_THAT(test::thrown_by<Error>([] { split_words("-o 'x"); }), HasSubstr("without end"));
}

}  // namespace
}  // namespace ds::launcher
