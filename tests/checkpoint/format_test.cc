// Whose checkpoint a folder holds.
#include "checkpoint/format.h"

#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "tests/support/scratch_folder.h"
#include "tools/checkpoint/location.h"

namespace ds::checkpoint {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr const char* kRankFile = "optimizer-00001-of-00002.safetensors";

TEST(CheckpointFormat, IsToldByNames) {
  const test::ScratchFolder folder;
  const std::pair<const char*, Format> expected[] = {
      {"index.json", Format::kDsengine},
      {kRankFile, Format::kDsengine},
      {"mp_rank_00_model_states.pt", Format::kDeepSpeed},
      {"zero_pp_rank_1_mp_rank_00_optim_states.pt", Format::kDeepSpeed},
      {"model.safetensors", Format::kHuggingFace},
      {"model.safetensors.index.json", Format::kHuggingFace},
      {"model-00001-of-00003.safetensors", Format::kHuggingFace},
      {"weights.safetensors", Format::kUnknown},
      {"model.bin", Format::kUnknown},
  };
  for (const auto& [name, format] : expected) {
    const std::string tag = std::string("tag_of_") + name;
    folder.write(tag + "/" + name, "");
    EXPECT_EQ(format_of(folder / tag), format) << name;
    EXPECT_EQ(tool::locate(folder / tag).format, format) << name;
  }
  EXPECT_EQ(format_of(folder / "absent"), Format::kUnknown);
  EXPECT_EQ(format_of(folder / "absent.safetensors"), Format::kUnknown);
  EXPECT_EQ(format_of(folder.write("any.safetensors", "")), Format::kHuggingFace);
  EXPECT_EQ(format_of(folder.write("any.pt", "")), Format::kTorch);
  EXPECT_EQ(format_of(folder.write("any.txt", "")), Format::kUnknown);
  EXPECT_EQ(format_of(folder.write("named_otherwise", "PK\3\4")), Format::kTorch);
}

TEST(CheckpointFormat, OfSeveralTheOneThatHasMore) {
  const test::ScratchFolder folder;
  folder.write("tag/model.safetensors", "");
  EXPECT_EQ(format_of(folder / "tag"), Format::kHuggingFace);
  folder.write("tag/mp_rank_00_model_states.pt", "");
  EXPECT_EQ(format_of(folder / "tag"), Format::kDeepSpeed);
  folder.write("tag/index.json", "");
  EXPECT_EQ(format_of(folder / "tag"), Format::kDsengine);
}

// What is there but cannot be opened is named, not taken for nothing.
TEST(CheckpointFormat, OpenNamesTheIndexThatIsMissing) {
  const test::ScratchFolder folder;
  folder.write(std::string("unfinished/") + kRankFile, "");
  EXPECT_THAT([&] { open(folder / "unfinished"); }, ThrowsMessage<IoError>(HasSubstr("unfinished/index.json")));
  folder.write("shards/model-00001-of-00003.safetensors", "");
  EXPECT_THAT([&] { open(folder / "shards"); }, ThrowsMessage<IoError>(HasSubstr("model.safetensors.index.json")));
}

}  // namespace
}  // namespace ds::checkpoint
