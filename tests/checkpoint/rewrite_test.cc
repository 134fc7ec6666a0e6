// Any checkpoint written again in dsengine's format.
#include "checkpoint/export.h"

#include <filesystem>
#include <string>

#include "checkpoint/folder_source.h"
#include "checkpoint/index.h"
#include "checkpoint/tag_folder.h"
#include "core/check.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct RewrittenSource : MemorySource {
  RewrittenSource() {
    add("weights/a", torch::arange(30, torch::kFloat).view({5, 6}));
    add("weights/b", torch::arange(2, torch::kHalf), /*frozen=*/true);
    add("optimizer/exp_avg/a", torch::arange(30, torch::kFloat).view({5, 6}) * 3);
    add("weights/none", torch::empty({0}));
    add_alias("c", "a");
    mutable_state().global_steps = 12;
    mutable_state().client_state = {{"note", "kept"}};
  }
};

TEST(Rewrite, TwiceIsTheSame) {
  const test::ScratchFolder folder;
  RewrittenSource source;
  rewrite(source, folder / "one/tag", 3);
  const auto first = open_folder(folder / "one/tag");
  EXPECT_EQ(first->tensors(), source.tensors());
  EXPECT_EQ(first->aliases(), source.aliases());
  EXPECT_EQ(to_json(first->state()), to_json(source.state()));
  rewrite(*first, folder / "two/tag");
  const auto second = open_folder(folder / "two/tag");
  for (const auto& [path, info] : source.tensors()) {
    EXPECT_TRUE(torch::equal(second->tensor(path), source.tensor(path))) << path;
  }
  EXPECT_EQ(read_latest(folder / "two"), "tag");
}

TEST(Rewrite, HoldsOnePieceAtATime) {
  const test::ScratchFolder folder;
  RewrittenSource source;
  rewrite(source, folder / "tag", 4);
  EXPECT_LE(source.largest_read(), 8);
}

// It reads the folder that it replaces.
TEST(Rewrite, InItsOwnPlace) {
  const test::ScratchFolder folder;
  RewrittenSource source;
  rewrite(source, folder / "tag", 3);
  const auto found = open_folder(folder / "tag");
  rewrite(*found, folder / "tag", 1);
  EXPECT_TRUE(verify(folder / "tag").empty());
  EXPECT_FALSE(fs::exists(folder / "tag/weights-00001-of-00003.safetensors"));
  EXPECT_TRUE(torch::equal(open_folder(folder / "tag")->tensor("weights/a"), source.tensor("weights/a")));
}

TEST(Rewrite, OddPaths) {
  const test::ScratchFolder folder;
  RewrittenSource source;
  rewrite(source, folder / "deep/er/../er/tag/");
  EXPECT_TRUE(fs::exists(folder / "deep/er/tag/index.json"));
  EXPECT_THROW(rewrite(source, folder / "tag", 0), UsageError);
  EXPECT_THROW(rewrite(source, folder / "latest"), UsageError);
}

TEST(Rewrite, ASourceThatFailsLeavesNothing) {
  const test::ScratchFolder folder;
  RewrittenSource source;
  rewrite(source, folder / "tag");
  source.damage("weights/b");
  for (const int ranks : {1, 3}) {
    EXPECT_THAT([&] { rewrite(source, folder / "tag", ranks); }, ThrowsMessage<IoError>(HasSubstr("weights/b")));
    EXPECT_THROW(rewrite(source, folder / "other", ranks), IoError);
  }
  EXPECT_TRUE(verify(folder / "tag").empty());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2);  // tag, latest
}

}  // namespace
}  // namespace ds::checkpoint
