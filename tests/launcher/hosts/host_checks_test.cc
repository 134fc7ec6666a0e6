#include "launcher/hosts/host_checks.h"

#include <gmock/gmock.h>

#include "core/check.h"
#include "launcher/program/own_program.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

HostAnswer answer(const std::string& host, const std::string& program, const std::string& launcher = "L") {
  return {.host = host,
          .reply = CheckReply{.launcher_hash = launcher,
                              .program_hash = program,
                              .program = "/x/train",
                              .address = {},
                              .port = 0,
                              .exit_code = 0,
                              .problems = {},
                              .notes = {}},
          .no_reply_because = {}};
}

TEST(HostChecks, EqualHostsAreReady) {
  EXPECT_THAT(compare_answers({answer("a", "P"), answer("b", "P")}, "L"), IsEmpty());
}

TEST(HostChecks, TheHostWithAnotherProgramIsNamed) {
  EXPECT_THAT(compare_answers({answer("a", "Q"), answer("b", "P"), answer("c", "P")}, "L"),
              ElementsAre(StartsWith("a: /x/train is another file than on b")));
  EXPECT_THAT(compare_answers({answer("a", "Q"), answer("b", "P")}, "L"),
              ElementsAre(StartsWith("b: /x/train is another file than on a")));
}

TEST(HostChecks, AllTroubleIsToldTogether) {
  HostAnswer silent{.host = "b", .reply = {}, .no_reply_because = "ssh cannot reach it"};
  HostAnswer lacking = answer("c", "");
  lacking.reply->problems = {"no program", "no slot"};
  lacking.reply->exit_code = 127;
  const std::vector<HostAnswer> answers = {answer("a", "P", "M"), silent, lacking};
  EXPECT_THAT(compare_answers(answers, "L"), ElementsAre(HasSubstr("a: its ds-launch is another file"),
                                                         "b: ssh cannot reach it", "c: no program", "c: no slot"));
  EXPECT_THAT(troubles_of_hosts(answers, "L")[2], ElementsAre("no program", "no slot"));
  EXPECT_EQ(exit_code_of(answers), 127);
  EXPECT_EQ(exit_code_of(std::vector<HostAnswer>{silent}), 2);
}

TEST(FileHash, TellsFilesApart) {
  test::ScratchFolder folder;
  const std::string same = std::string(3 << 20, 'x');
  const std::string a = file_hash(folder.write("a", same)), b = file_hash(folder.write("b", same));
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.size(), 32u);
  EXPECT_NE(a, file_hash(folder.write("c", same + "y")));
  EXPECT_EQ(file_hash(folder.write("empty", "")), "99aa06d3014798d86001c324468d497f");  // of XXH3's own test vectors
  EXPECT_THAT(test::thrown_by<Error>([&] { file_hash(folder / "none"); }), HasSubstr("No such file"));
}

}  // namespace
}  // namespace ds::launcher
