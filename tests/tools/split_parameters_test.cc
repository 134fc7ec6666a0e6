// ds-tool check --split_parameters: what tensor_parallel cuts of a model, its memory and its traffic.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/config/scratch_file.h"
#include "tests/tools/command_outcome.h"
#include "tools/check_command.h"
#include "tools/split_parameters.h"

namespace ds::tool {
namespace {

using engine::config::ScratchFile;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Outcome checked(const CheckOptions& options) {
  return outcome_of([&](auto& out, auto& err) { return check(options, out, err); });
}

// Two layers of the example's GPT: hidden 32, 64 words, 16 places.
constexpr const char* kGpt = R"({
  "wte.weight": [64, 32], "wpe.weight": [16, 32],
  "h.0.ln1.weight": [32], "h.0.attn.qkv.weight": [96, 32], "h.0.attn.qkv.bias": [96], "h.0.attn.proj.weight": [32, 32],
  "h.0.attn.proj.bias": [32], "h.0.mlp.fc.weight": [128, 32], "h.0.mlp.fc.bias": [128],
  "h.0.mlp.proj.weight": [32, 128], "h.0.mlp.proj.bias": [32],
  "h.1.ln1.weight": [32], "h.1.attn.qkv.weight": [96, 32], "h.1.attn.qkv.bias": [96], "h.1.attn.proj.weight": [32, 32],
  "h.1.attn.proj.bias": [32], "h.1.mlp.fc.weight": [128, 32], "h.1.mlp.fc.bias": [128],
  "h.1.mlp.proj.weight": [32, 128], "h.1.mlp.proj.bias": [32],
  "head.weight": [64, 32]})";
constexpr int64_t kOfALayer = 12 * 32 * 32 + 96 + 32 + 128 + 32 + 32;
constexpr int64_t kCutOfALayer = (12 * 32 * 32 + 96 + 128) / 2;

constexpr const char* kTwo = R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
  "optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 2}})";

TEST(SplitParameters, EachPatternAndItsCut) {
  const ScratchFile config(kTwo);
  const ScratchFile shapes(kGpt, "_shapes");
  const Outcome outcome = checked({.config = config.path(), .world_size = 4, .split_parameters = shapes.path()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("4 (data parallel 2 x tensor 2)"), HasSubstr("Parameters over 2 ranks"),
            HasSubstr("inside a host where hosts have a multiple of 2 ranks"),
            HasSubstr("h.*.attn.qkv.weight   2 x [96, 32]   dimension 0 in blocks of 32, 32, 32  column, by its name"),
            HasSubstr("row, by its name"), HasSubstr("a bias is added once"), HasSubstr("no rule matches"),
            HasSubstr("vocabulary, by vocab_parallel_lm_head"), HasSubstr("unknown: --tokens N")));
}

TEST(SplitParameters, MemoryAndTraffic) {
  const ScratchFile config(kTwo);
  const ScratchFile shapes(kGpt, "_shapes");
  const Outcome outcome = checked(
      {.config = config.path(), .world_size = 2, .split_parameters = shapes.path(), .tokens = 32, .json = true});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  const int64_t whole = 2 * kOfALayer + 2 * 64 * 32 + 16 * 32;
  const int64_t parts = 2 * kCutOfALayer + 64 * 32;
  EXPECT_EQ(report["split"]["model_elements"], whole);
  EXPECT_EQ(report["split"]["part_elements"], parts);
  EXPECT_EQ(report["split"]["rank_elements"], whole - parts);
  EXPECT_EQ(report["bytes_per_rank"]["elements"], whole - parts);
  EXPECT_EQ(report["split"]["parameters"][0]["names"], "wte.weight");
  // tests/parallel/traffic_test.cc counts as many: for each layer two sums forward and two backward, one for the
  // embedding and one for the head, and three numbers of the loss for each row.
  const int64_t tokens = 32;
  const int64_t hidden = tokens * 32 * 4;  // 2 n (T - 1) / T is n for two ranks
  EXPECT_EQ(report["bytes_per_rank"]["tensor_sent_per_step"], 3 * ((4 * 2 + 2) * hidden + 3 * tokens * 4));
}

TEST(SplitParameters, OneTiedMatrixIsEmbeddingAndHead) {
  const ScratchFile config(kTwo);
  const ScratchFile shapes(R"({"wte.weight": [64, 32]})", "_shapes");
  const Outcome outcome =
      checked({.config = config.path(), .world_size = 2, .split_parameters = shapes.path(), .tokens = 1, .json = true});
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["bytes_per_rank"]["tensor_sent_per_token"], 2 * 32 * 4 + 3 * 4);
}

TEST(SplitParameters, WithoutNamesAllIsTakenForSplit) {
  const ScratchFile config(kTwo);
  const Outcome outcome = checked({.config = config.path(), .world_size = 2, .parameters = 1001});
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("for 501 elements, 1/2 of the model, if all of it is split"),
                                 HasSubstr("--split_parameters")));
}

TEST(SplitParameters, AModelOfWhichNothingIsSplitIsToldWhatToWrite) {
  const ScratchFile config(kTwo);
  for (const char* text : {R"({"gate.weight": [64, 32]})", R"({"scores.weight": [64, 32]})"}) {
    const ScratchFile shapes(text, "_shapes");
    const Outcome outcome = checked({.config = config.path(), .world_size = 2, .split_parameters = shapes.path()});
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("each of the 2 ranks would compute all of it"),
                                   HasSubstr("tensor_parallel.partition_config.layer_specs")));
  }
}

TEST(SplitParameters, OneRankCutsNothing) {
  const ScratchFile config(R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}})");
  const ScratchFile shapes(kGpt, "_shapes");
  const Outcome outcome = checked({.config = config.path(), .split_parameters = shapes.path(), .json = true});
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["split"]["part_elements"], 0);
  EXPECT_TRUE(report["bytes_per_rank"]["tensor_sent_per_token"].is_null());
}

TEST(SplitParameters, MistakesAreNamed) {
  const ScratchFile config(kTwo);
  const ScratchFile shapes(kGpt, "_shapes");
  const auto error = [&](const std::string& file, std::optional<int64_t> parameters = std::nullopt) {
    return checked({.config = config.path(), .world_size = 2, .parameters = parameters, .split_parameters = file}).err;
  };
  EXPECT_THAT(error(shapes.path(), 3), HasSubstr("expected one of --parameters and --split_parameters"));
  EXPECT_THAT(error("/nowhere/at/all"), HasSubstr("/nowhere/at/all: cannot be opened"));
  EXPECT_THAT(error(ScratchFile("[1]", "_wrong").path()), HasSubstr("expected a safetensors file, or a JSON object"));
  EXPECT_THAT(error(ScratchFile(R"({"a": [1, "x"]})", "_wrong").path()), HasSubstr("'a': expected a list of sizes"));
  EXPECT_THAT(error(ScratchFile("{}", "_wrong").path()), HasSubstr("found 0"));
}

TEST(SplitParameters, OddFilesAreRefusedInWords) {
  const ScratchFile config(kTwo);
  const auto error = [&](const std::string& text) {
    const ScratchFile shapes(text, "_odd");
    return checked({.config = config.path(), .world_size = 2, .split_parameters = shapes.path()}).err;
  };
  EXPECT_THAT(error("{\"a\":" + std::string(100'000, '[')), HasSubstr("expected a safetensors file, or a JSON object"));
  EXPECT_THAT(error("{\"h." + std::string(100'000, '0') + "\":[1]}"), HasSubstr("names of up to 1000 letters"));
  std::string many = "{";
  for (int i = 0; i < 8192; ++i) many += cat(i > 0 ? "," : "", "\"w", i, "\":[1048576,1073741824]");
  EXPECT_THAT(error(many + "}"), HasSubstr("elements in all"));
  EXPECT_THAT(error("PK" + std::string(size_t{17} << 20, 'x')), HasSubstr("that is longer"));
  // Scalars beside what names know.
  for (const char* scalars : {R"({"c_fc.weight":[4,8],"c_fc.bias":[]})",
                              R"({"a.q_norm.weight":[64],"a.q_proj.weight":[128,128],"a.k_proj.weight":[]})"}) {
    EXPECT_EQ(error(scalars), "") << scalars;
  }
}

void write_safetensors(const std::filesystem::path& path, const std::string& header) {
  std::ofstream out(path, std::ios::binary);
  for (size_t i = 0; i < 8; ++i) out.put(static_cast<char>(header.size() >> (8 * i)));
  out << header;
}

TEST(ParameterShapes, OfSafetensorsFilesInAFolder) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "split_parameters";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  write_safetensors(folder / "b.safetensors", R"({"y":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})");
  write_safetensors(folder / "a.safetensors",
                    R"({"__metadata__":{"format":"pt"},"x":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]}})");
  const auto shapes = read_parameter_shapes(folder.string());
  ASSERT_EQ(shapes.size(), 2U);
  EXPECT_EQ(shapes[0].name, "x");
  EXPECT_THAT(shapes[0].sizes, ElementsAre(3, 2));
  EXPECT_TRUE(shapes[1].sizes.empty());
  write_safetensors(folder / "c.safetensors", R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})");
  try {
    read_parameter_shapes(folder.string());
    FAIL() << "accepted";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'x' is there twice"));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ds::tool
