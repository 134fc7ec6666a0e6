// The tables of configs/README.md as ds-tool reads them.
#include "tools/key_reference.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "config/supported.h"

namespace ds::tool {
namespace {

using ::testing::AnyOf;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST(KeyReference, ReadsTablesBySection) {
  const KeyReference reference(
      "# page\n"
      "| Key | Default | Meaning |\n|---|---|---|\n| `seed` | 1234 | [numbers](a.md) of `torch` |\n"
      "text\n"
      "### `fp16`\n\n"
      "| Key | Default | Types | Meaning |\n|---|---|---|---|\n| `a`, `b` | 1 | x | both |\n"
      "### `groups.*`\n| Key | Default | Meaning |\n|---|---|---|\n| `size` | 3 | how many |\n"
      "### `groups.*.of.*`\n| Key | Meaning |\n|---|---|\n| `kind` | which |\n"
      "## Refused in this version\n"
      "| Key | Refused when |\n|---|---|\n| `amp` | enabled |\n"
      "## Python only\nRead: `wandb`.\n");
  EXPECT_EQ(reference.find("seed")->standard, "1234");
  EXPECT_EQ(reference.find("seed")->meaning, "numbers of torch");
  EXPECT_EQ(reference.find("fp16.b")->meaning, "both");
  EXPECT_EQ(reference.find("groups.mine.size")->meaning, "how many");
  EXPECT_EQ(reference.find("groups.mine.size")->path, "groups.mine.size");
  EXPECT_EQ(reference.find("groups.mine.of.yours.kind")->meaning, "which");
  EXPECT_EQ(reference.find("groups.size"), std::nullopt);
  EXPECT_EQ(reference.find("groups.mine.other"), std::nullopt);
  EXPECT_EQ(reference.find("amp.opt_level")->path, "amp");
  EXPECT_EQ(reference.find("amp.opt_level")->refused, "enabled");
  EXPECT_TRUE(reference.find("wandb")->without_effect);
  EXPECT_EQ(reference.find("b"), std::nullopt);
}

// A key that comes must be on the page.
TEST(KeyReference, HasEveryKnownKey) {
  const KeyReference reference(key_reference_text());
  const std::vector<std::string> known = engine::config::known_keys();
  for (const std::string& key : known) {
    const auto inside = [&key](const std::string& other) { return other.starts_with(key + "."); };
    if (std::any_of(known.begin(), known.end(), inside)) continue;  // a section
    nlohmann::ordered_json written;
    nlohmann::ordered_json* place = &written;
    for (size_t begin = 0, dot = 0; dot != std::string::npos; begin = dot + 1) {
      dot = key.find('.', begin);
      place = &(*place)[key.substr(begin, dot - begin)];
    }
    *place = true;
    const auto explained = explain_keys(written, reference);
    ASSERT_EQ(explained.size(), 1U) << key;
    EXPECT_EQ(explained.front().path, key);
    EXPECT_THAT(explained.front().text, Not(AnyOf(IsEmpty(), StartsWith("No key"), StartsWith("A key of DeepSpeed"))))
        << key;
  }
}

// Keys below a name of the file's own, and parts of a key that is an object of the file's own.
TEST(KeyReference, ExplainsMetricsAndGroups) {
  const KeyReference reference(key_reference_text());
  nlohmann::ordered_json written;
  auto& sampling = written["data_efficiency"]["data_sampling"];
  auto& metric = sampling["curriculum_learning"]["curriculum_metrics"]["length"];
  metric["difficulty_type"] = "value";
  metric["schedule_config"]["root_degree"] = 2;
  metric["dificulty"] = 2;
  written["compression_training"]["row_pruning"]["different_groups"]["g"]["modules"] = {"*"};
  const auto explained = explain_keys(written, reference);
  ASSERT_EQ(explained.size(), 4U);
  EXPECT_THAT(explained[0].text, StartsWith("value: samples of at most the difficulty"));
  EXPECT_THAT(explained[1].text, StartsWith("fixed_root: the difficulty grows"));
  EXPECT_THAT(explained[2].text, StartsWith("No key of a ds_config"));
  EXPECT_THAT(explained[3].text, StartsWith("A part of compression_training.row_pruning.different_groups: "));
}

}  // namespace
}  // namespace ds::tool
