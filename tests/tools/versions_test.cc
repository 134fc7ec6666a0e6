#include "tools/report/versions.h"

#include <gmock/gmock.h>

#include "tests/support/scratch_folder.h"
#include "tools/report/kernel_text.h"

namespace ds::tool::report {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(Field, TakesTheFirstLineThatHasIt) {
  EXPECT_EQ(field("MemTotalX: 1\nMemTotal:   24 kB\nMemTotal: 9\n", "MemTotal"), "24 kB");
  EXPECT_EQ(number_field("MemTotal:   24 kB\n", "MemTotal"), 24);
  EXPECT_EQ(field("a = \"b c\"\n", "a"), "b c");
  EXPECT_EQ(field("a\n", "a"), "");
  EXPECT_EQ(number_field("a: max\n", "a"), std::nullopt);
}

TEST(Distribution, IsThePrettyName) {
  EXPECT_EQ(distribution("NAME=\"Debian\"\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\n"),
            "Debian GNU/Linux 12 (bookworm)");
  EXPECT_EQ(distribution("ID=none\n"), "");
}

TEST(ToolkitVersion, IsWhatFollowsV) {
  EXPECT_EQ(toolkit_version("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\nB"),
            "13.0.88");
  EXPECT_EQ(toolkit_version("something else"), "");
}

TEST(Versions, NameWhatWasBuiltAndWhyLibTorchIsMissing) {
  const test::ScratchFolder root;
  root.write("etc/os-release", "PRETTY_NAME=\"Some Linux 1\"\n");
  const auto json = to_json(describe_versions({{"error", "ds-tool-libraries: exit code 127"}}, root.path()));
  EXPECT_THAT(build_facts().version, Not(IsEmpty()));
  EXPECT_EQ(json["dsengine"]["version"], build_facts().version);
  EXPECT_EQ(json["distribution"], "Some Linux 1");
  EXPECT_TRUE(json["libtorch"].is_null());
  for (const char* name : {"built_with", "cuda_toolkit", "kernel", "glibc"}) EXPECT_TRUE(json.contains(name)) << name;
}

}  // namespace
}  // namespace ds::tool::report
