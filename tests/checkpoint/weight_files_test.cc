// Files of weights as a checkpoint.
#include "checkpoint/weight_files.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/checkpoint.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class WeightFilesTest : public testing::Test {
 protected:
  // Two shards and their index.
  void write_shards(const std::string& weight_map) {
    write_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"a", a_}});
    write_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"b", b_}});
    folder_.write("model.safetensors.index.json",
                  R"({"metadata": {"total_size": 1}, "weight_map": )" + weight_map + "}");
  }
  std::string path() const { return folder_.path().string(); }

  test::ScratchFolder folder_;
  at::Tensor a_ = torch::arange(24, torch::kFloat).view({4, 6}) / 7;
  at::Tensor b_ = torch::arange(5, torch::kLong);
  const std::string map_ = R"({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})";
};

TEST_F(WeightFilesTest, OneFileAndAFolderOfOneAreTheSame) {
  write_safetensors(folder_ / "model.safetensors", {{"a", a_}, {"b", b_}});
  for (const std::string& place : {path(), folder_ / "model.safetensors"}) {
    const auto source = open_weights(place);
    EXPECT_EQ(source->location(), place);
    EXPECT_EQ(source->tensors().size(), 2U);
    EXPECT_TRUE(torch::equal(source->tensor("weights/a"), a_));
    EXPECT_TRUE(torch::equal(source->tensor("weights/b"), b_));
    EXPECT_FALSE(source->state().optimizer.has_value());
    EXPECT_EQ(source->info("weights/a"), (TensorInfo{.dtype = at::kFloat, .sizes = {4, 6}}));
  }
}

TEST_F(WeightFilesTest, ShardsAreReadThroughTheirIndex) {
  write_shards(map_);
  const auto source = open_weights(path());
  EXPECT_TRUE(torch::equal(source->tensor("weights/a"), a_));
  EXPECT_TRUE(torch::equal(source->tensor("weights/b"), b_));
}

TEST_F(WeightFilesTest, RangesAreReadAndConverted) {
  write_safetensors(folder_ / "model.safetensors", {{"a", a_}});
  const auto source = open_weights(path());
  const at::Tensor part = torch::empty({2, 5}, torch::kBFloat16);
  source->read("weights/a", 7, part);
  EXPECT_TRUE(torch::equal(part, a_.view({-1}).narrow(0, 7, 10).view({2, 5}).to(torch::kBFloat16)));
  EXPECT_THAT([&] { source->read("weights/a", 20, torch::empty({5})); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights/a"), HasSubstr("24 elements"))));
  EXPECT_THAT([&] { source->tensor("weights/c"); }, ThrowsMessage<IoError>(HasSubstr("weights/c")));
}

TEST_F(WeightFilesTest, NamesOfTiedWeightsInTheMetadataAreAliases) {
  write_safetensors(folder_ / "model.safetensors", {{"a", a_}, {"b", b_}},
                    {{"format", "pt"}, {"head", "a"}, {"b", "a"}, {"x", "absent"}});
  EXPECT_EQ(open_weights(path())->aliases(), (std::map<std::string, std::string>{{"head", "a"}}));
}

TEST_F(WeightFilesTest, AMissingFileOfTheIndexIsNamed) {
  write_shards(map_);
  std::filesystem::remove(folder_ / "model-00002-of-00002.safetensors");
  EXPECT_THAT([&] { open_weights(path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("model-00002-of-00002.safetensors"), HasSubstr("\"b\""))));
}

TEST_F(WeightFilesTest, ATensorThatIsNotWhereTheIndexSaysIsNamed) {
  write_shards(R"({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors",
                   "c": "model-00002-of-00002.safetensors"})");
  EXPECT_THAT([&] { open_weights(path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("model-00002-of-00002.safetensors"), HasSubstr("\"c\""))));
}

TEST_F(WeightFilesTest, ATensorThatTheIndexDoesNotNameIsRefused) {
  write_shards(map_);
  write_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"a", a_}, {"z", b_}});
  EXPECT_THAT([&] { open_weights(path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("model-00001-of-00002.safetensors"), HasSubstr("2 tensors"))));
}

TEST_F(WeightFilesTest, ATensorInTwoFilesIsNamed) {
  write_shards(map_);
  write_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"a", a_}, {"b", b_}});
  EXPECT_THAT([&] { open_weights(path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("\"a\""), HasSubstr("00001-of"), HasSubstr("00002-of"))));
}

TEST_F(WeightFilesTest, AnIndexReachesNoOtherFolder) {
  for (const std::string name : {"../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\u0000b"}) {
    write_shards("{\"a\": \"" + name + "\"}");
    EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("tensor \"a\""))) << name;
  }
}

TEST_F(WeightFilesTest, ALinkLeadsToNoOtherFolderButTheBlobsOfItsCache) {
  namespace fs = std::filesystem;
  const test::ScratchFolder other;
  write_shards(map_);
  fs::rename(folder_ / "model-00001-of-00002.safetensors", other / "file");
  fs::create_symlink(other / "file", folder_ / "model-00001-of-00002.safetensors");
  EXPECT_THAT([&] { open_weights(path()); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("is a link to " + (other / "file")), HasSubstr("\"a\""))));

  // As huggingface_hub lays its cache out.
  const fs::path cache = other / "models--some--model";
  const fs::path snapshot = cache / "snapshots" / "0123abcd";
  fs::create_directories(cache / "blobs");
  fs::create_directories(snapshot);
  fs::rename(other / "file", cache / "blobs" / "one");
  fs::rename(folder_ / "model-00002-of-00002.safetensors", cache / "blobs" / "two");
  fs::create_symlink("../../blobs/one", snapshot / "model-00001-of-00002.safetensors");
  fs::create_symlink("../../blobs/two", snapshot / "model-00002-of-00002.safetensors");
  fs::copy(folder_ / "model.safetensors.index.json", snapshot);
  EXPECT_TRUE(torch::equal(open_weights(snapshot.string())->tensor("weights/a"), a_));
}

TEST_F(WeightFilesTest, WhatIsNoFileIsNotWaitedFor) {
  write_shards(map_);
  std::filesystem::remove(folder_ / "model.safetensors.index.json");
  ASSERT_EQ(mkfifo((folder_ / "model.safetensors.index.json").c_str(), 0600), 0);
  EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("expected a file")));
  ASSERT_EQ(mkfifo((folder_ / "pipe.safetensors").c_str(), 0600), 0);
  EXPECT_THAT([&] { open_weights(folder_ / "pipe.safetensors"); },
              ThrowsMessage<IoError>(HasSubstr("expected a regular file")));
}

TEST_F(WeightFilesTest, WhatIsNoWeightFileIsRefused) {
  EXPECT_THAT([&] { open_weights(folder_ / "absent"); }, ThrowsMessage<IoError>(HasSubstr("no such file")));
  EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("model.safetensors.index.json")));
  folder_.write("model.safetensors.index.json", "{\"weight_map\": [");
  EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("not JSON")));
  folder_.write("model.safetensors.index.json",
                "{\"weight_map\": {\"a\": " + std::string(3'000'000, '[') + std::string(3'000'000, ']') + "}}");
  EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("weight_map")));
  folder_.write("model.safetensors.index.json", "{}");
  EXPECT_THAT([&] { open_weights(path()); }, ThrowsMessage<IoError>(HasSubstr("weight_map")));
}

TEST(ShardNames, AreThoseOfHuggingFace) {
  EXPECT_EQ(shard_name(2, 17), "model-00002-of-00017.safetensors");
  EXPECT_TRUE(is_shard_name("model-00002-of-00017.safetensors"));
  EXPECT_FALSE(is_shard_name("model.safetensors"));
  EXPECT_FALSE(is_shard_name("model-0000x-of-00017.safetensors"));
  EXPECT_FALSE(is_shard_name("mo3el-00002-of-00017.safetensors"));
}

}  // namespace
}  // namespace ds::checkpoint
