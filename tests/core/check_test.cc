#include "core/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <ostream>
#include <string>
#include <system_error>

#include "core/system_call.h"

namespace ds {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Check, RequireJoinsThePartsOfTheMessage) {
  try {
    require<ConfigError>(1 + 1 == 3, "expected ", 3, ", found ", 2);
    FAIL() << "did not throw";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "expected 3, found 2");
  }
  EXPECT_NO_THROW(require(true, "unused"));
}

// A part of a message that counts how often it is written.
struct Counted {
  int* written;

  friend std::ostream& operator<<(std::ostream& out, const Counted& counted) {
    ++*counted.written;
    return out << "counted";
  }
};

TEST(Check, AConditionThatHoldsWritesNoPart) {
  int written = 0;
  int made = 0;
  const auto part = lazy([&] {
    ++made;
    return Counted{&written};
  });
  require(true, "found ", Counted{&written}, " and ", part);
  require_system(true, "found ", Counted{&written}, " and ", part);
  EXPECT_EQ(written, 0);
  EXPECT_EQ(made, 0);
  EXPECT_THROW(require(false, "found ", Counted{&written}, " and ", part), UsageError);
  EXPECT_EQ(written, 2);
  EXPECT_EQ(made, 1);
}

void require_positive(int number, const Printable& what) { require(number > 0, what, ": expected more than 0"); }

TEST(Check, APrintableWritesWhatItViewsOnlyWhenItThrows) {
  int written = 0;
  require_positive(1, Counted{&written});
  EXPECT_EQ(written, 0);
  EXPECT_THAT([&] { require_positive(0, Counted{&written}); },
              ThrowsMessage<UsageError>("counted: expected more than 0"));
  EXPECT_EQ(written, 1);
  EXPECT_EQ(cat(Printable("text"), Printable(7), Printable(std::string(" and more"))), "text7 and more");
}

TEST(Check, RequireSystemEndsWithTheSystemsReason) {
  errno = ENOENT;
  EXPECT_THAT([] { require_system<IoError>(false, "/nowhere: cannot be read"); },
              ThrowsMessage<IoError>("/nowhere: cannot be read: No such file or directory"));
  EXPECT_EQ(cat(SystemReason(EACCES)), "Permission denied");
  EXPECT_EQ(cat(SystemReason(std::make_error_code(std::errc::file_exists))), "File exists");
}

TEST(Check, EnsureNamesTheInvariantAndThePlace) {
  try {
    ensure(false, "buckets are sorted");
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("buckets are sorted"));
    EXPECT_THAT(error.what(), HasSubstr("check_test.cc"));
  }
}

}  // namespace
}  // namespace ds
