// Weights of a checkpoint as files in Hugging Face's layout.
#include "checkpoint/export.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "checkpoint/weight_files.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

class ExportTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    source_.add("weights/a", torch::randn({10, 10}));               // 400 bytes
    source_.add("weights/b", torch::randn({25}), /*frozen=*/true);  // 100
    source_.add("weights/c", torch::randn({5, 5}));                 // 100
    source_.add("buffers/mean", torch::randn({3}));                 // 12
    source_.add("buffers/count", torch::tensor(7, torch::kLong));   // 8
    source_.add("optimizer/exp_avg/a", torch::randn({10, 10}));
    source_.add("ranks/0/rng", torch::zeros({4}, torch::kByte));
    source_.add_alias("head", "a");
  }
  ExportedFiles write(const ExportOptions& options = {}) { return export_weights(source_, path(), options); }
  std::string path() const { return folder_ / "out"; }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) names.insert(entry.path().filename());
    return names;
  }
  nlohmann::json index() const {
    return nlohmann::json::parse(std::ifstream(path() + "/model.safetensors.index.json"));
  }

  test::ScratchFolder folder_;
  MemorySource source_;
};

TEST_F(ExportTest, OneFileHoldsWeightsAndBuffersBitForBit) {
  const ExportedFiles written = write();
  EXPECT_THAT(written.files, ElementsAre("model.safetensors"));
  EXPECT_EQ(written.tensors, 5);
  EXPECT_EQ(written.bytes, 620);
  EXPECT_EQ(files(), std::set<std::string>{"model.safetensors"});
  const SafetensorsFile file(path() + "/model.safetensors");
  EXPECT_EQ(file.entries().size(), 5U);
  for (const std::string name : {"a", "b", "c"}) {
    EXPECT_TRUE(torch::equal(file.tensor(name), source_.tensor("weights/" + name))) << name;
  }
  EXPECT_TRUE(torch::equal(file.tensor("mean"), source_.tensor("buffers/mean")));
  EXPECT_TRUE(torch::equal(file.tensor("count"), source_.tensor("buffers/count")));
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"head", "a"}}));
  EXPECT_EQ(open_weights(path())->aliases(), source_.aliases());
}

TEST_F(ExportTest, ShardsAreCutAtTheLimit) {
  // In the order of names: a 400, b 100, c 100, count 8, mean 12.
  const ExportedFiles written = write({.max_shard_bytes = 500});
  EXPECT_THAT(written.files, ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                         "model.safetensors.index.json"));
  EXPECT_EQ(index()["metadata"]["total_size"], 620);
  const nlohmann::json expected = {{"a", "model-00001-of-00002.safetensors"},
                                   {"b", "model-00001-of-00002.safetensors"},
                                   {"c", "model-00002-of-00002.safetensors"},
                                   {"count", "model-00002-of-00002.safetensors"},
                                   {"mean", "model-00002-of-00002.safetensors"}};
  EXPECT_EQ(index()["weight_map"], expected);
  const auto read_back = open_weights(path());
  EXPECT_TRUE(torch::equal(read_back->tensor("weights/c"), source_.tensor("weights/c")));

  write({.max_shard_bytes = 499});
  EXPECT_EQ(index()["weight_map"]["b"], "model-00002-of-00002.safetensors") << "a and b are 500 bytes together";
  write({.max_shard_bytes = 1});
  EXPECT_EQ(index()["weight_map"]["a"], "model-00001-of-00005.safetensors") << "larger than a shard: alone in one";
  EXPECT_EQ(index()["weight_map"]["mean"], "model-00005-of-00005.safetensors");
  EXPECT_THAT(write({.max_shard_bytes = 620}).files, ElementsAre("model.safetensors"));
}

TEST_F(ExportTest, WhatAnOlderExportLeftIsReplaced) {
  write({.max_shard_bytes = 1});
  folder_.write("out/config.json", "{}");
  write({.max_shard_bytes = 500});
  EXPECT_EQ(files(), (std::set<std::string>{"config.json", "model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors", "model.safetensors.index.json"}));
  write();
  EXPECT_EQ(files(), (std::set<std::string>{"config.json", "model.safetensors"}));
  write({.max_shard_bytes = 500});
  EXPECT_FALSE(files().contains("model.safetensors"));
  EXPECT_EQ(open_weights(path())->tensors().size(), 5U);
}

TEST_F(ExportTest, DtypesAreConvertedAsTorchRounds) {
  const at::Tensor awkward = torch::tensor({1.00390625F, 1.0039063F, -1.01171875F, 3.4e38F, 1e-40F, 65504.0F, 0.1F});
  source_.add("weights/awkward", awkward);
  write({.dtype = at::kBFloat16});
  const SafetensorsFile file(path() + "/model.safetensors");
  EXPECT_TRUE(torch::equal(file.tensor("awkward"), awkward.to(torch::kBFloat16)));
  EXPECT_TRUE(torch::equal(file.tensor("a"), source_.tensor("weights/a").to(torch::kBFloat16)));
  EXPECT_EQ(file.tensor("count").scalar_type(), at::kLong) << "integers stay";
}

TEST_F(ExportTest, Float16RefusesWhatWouldBecomeInfinite) {
  source_.add("weights/large", torch::tensor({1.0F, 7e4F}));
  EXPECT_THAT([&] { write({.dtype = at::kHalf}); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights/large"), HasSubstr("65504"))));
  source_.add("weights/large", torch::tensor({1.0F, INFINITY, 65504.0F}));
  write({.dtype = at::kHalf});
  EXPECT_TRUE(torch::equal(SafetensorsFile(path() + "/model.safetensors").tensor("large"),
                           source_.tensor("weights/large").to(torch::kHalf)));
}

TEST_F(ExportTest, TensorsCanBeRenamedAndLeftOut) {
  write({.rename = [](const std::string& name) { return name == "c" ? std::string() : "model." + name; },
         .exclude_frozen = true,
         .buffers = false,
         .keep_aliases = true});
  const auto source = open_weights(path());
  EXPECT_EQ(source->tensors().size(), 2U);
  EXPECT_TRUE(torch::equal(source->tensor("weights/model.a"), source_.tensor("weights/a")));
  EXPECT_TRUE(torch::equal(source->tensor("weights/model.head"), source_.tensor("weights/a")));
}

TEST_F(ExportTest, TwoTensorsOfOneNameAreRefused) {
  EXPECT_THAT([&] { write({.rename = [](const std::string&) { return std::string("x"); }}); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("buffers/mean"), HasSubstr("\"x\""))));
  EXPECT_THAT([&] { write({.rename = [](const std::string&) { return std::string(); }}); },
              ThrowsMessage<UsageError>(HasSubstr("no tensor is left")));
}

TEST_F(ExportTest, AFailureInTheMiddleLeavesTheOlderExport) {
  for (const int64_t limit : {int64_t{1} << 40, int64_t{1}}) {
    write({.max_shard_bytes = limit});
    const std::set<std::string> before = files();
    const at::Tensor old = source_.tensor("weights/a");
    source_.add("weights/a", torch::zeros({10, 10}));
    source_.damage("weights/c");
    for (const int64_t next : {int64_t{1} << 40, int64_t{1}, int64_t{500}}) {
      EXPECT_THAT([&] { write({.max_shard_bytes = next}); }, ThrowsMessage<IoError>(HasSubstr("weights/c")));
      EXPECT_EQ(files(), before);
      EXPECT_TRUE(torch::equal(open_weights(path())->tensor("weights/a"), old));
    }
    source_.damage("");
    source_.add("weights/a", old);
  }
}

TEST_F(ExportTest, AFailureInAnEmptyFolderLeavesNothing) {
  source_.damage("weights/c");
  EXPECT_THROW(write(), IoError);
  EXPECT_TRUE(files().empty());
}

TEST_F(ExportTest, TensorsAreReadInParts) {
  const at::Tensor large = torch::arange((16 << 20) / 4 + 5, torch::kInt);
  source_.add("weights/large", large);
  source_.add("weights/empty", torch::empty({0, 3}));
  source_.add("weights/scalar", torch::tensor(2.5F));
  write();
  EXPECT_EQ(source_.largest_read(), (16 << 20) / 4);
  const SafetensorsFile file(path() + "/model.safetensors");
  EXPECT_TRUE(torch::equal(file.tensor("large"), large));
  EXPECT_EQ(file.tensor("empty").sizes(), (at::IntArrayRef{0, 3}));
  EXPECT_EQ(file.tensor("scalar").item<float>(), 2.5F);
}

}  // namespace
}  // namespace ds::checkpoint
