// ds-tool checkpoint inspect|verify|diff|convert.
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/export.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/weight_files.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/checkpoint.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/checkpoint/split_folder.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/tools/command_outcome.h"
#include "tools/checkpoint/command_line.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/text_columns.h"

namespace ds::checkpoint::tool {
namespace {

using ds::tool::Outcome;
using ds::tool::outcome_of;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

Outcome run_tool(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"ds-tool checkpoint"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return outcome_of([&](auto& out, auto& err) { return run(static_cast<int>(argv.size()), argv.data(), out, err); });
}

void fill(MemorySource& source) {
  torch::manual_seed(5);
  source.add("weights/wte.weight", torch::randn({6, 4}));
  source.add("weights/ln.weight", torch::randn({4}), /*frozen=*/true);
  source.add("buffers/mean", torch::randn({4}));
  for (const char* state : {"exp_avg", "exp_avg_sq"}) {
    source.add(state_path(state, "wte.weight"), torch::randn({6, 4}));
  }
  source.add_alias("head.weight", "wte.weight");
  TrainingState& state = source.mutable_state();
  state.global_steps = 20;
  state.global_samples = 640;
  state.world_size = 2;
  state.zero_stage = 2;
  state.precision = "bfloat16";
  state.optimizer = OptimizerState{.type = "Adam", .step_count = 19, .groups = {{.lr = 0.25}}};
  state.client_state = {{"epoch", 3}};
}

class CheckpointToolTest : public testing::Test {
 protected:
  void SetUp() override { fill(source_); }
  // In dsengine's format.
  std::string write_tag(const std::string& tag, int ranks = 2) {
    rewrite(source_, folder_ / ("run/" + tag), ranks);
    return folder_ / ("run/" + tag);
  }
  std::string a_file_of(const std::string& tag_folder, const std::string& kind) {
    for (const auto& entry : std::filesystem::directory_iterator(tag_folder)) {
      if (entry.path().filename().string().starts_with(kind)) return entry.path().string();
    }
    return {};
  }

  test::ScratchFolder folder_;
  MemorySource source_;
};

TEST_F(CheckpointToolTest, InspectSaysWhatIsThere) {
  write_tag("global_step5");
  write_tag("global_step20");
  const Outcome outcome = run_tool({"inspect", folder_ / "run", "--tensors"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("run/global_step20 (dsengine)"), HasSubstr("tags: global_step5 global_step20 (latest)"),
                    ContainsRegex("step +20\n"), ContainsRegex("samples +640\n"), ContainsRegex("ZeRO stage +2\n"),
                    ContainsRegex("precision +bfloat16\n")));
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("Adam, 19 updates"), HasSubstr("lr 0.25"), ContainsRegex("weights +2 +112 B\n"),
                    ContainsRegex("optimizer/exp_avg +1 +96 B\n"), ContainsRegex("total +5 +320 B\n"),
                    HasSubstr("index.json"), ContainsRegex("head.weight +is wte.weight"), HasSubstr("{\"epoch\":3}")));
  EXPECT_THAT(outcome.out, ContainsRegex("weights/ln.weight +Float +\\[4\\] +frozen"));
  EXPECT_THAT(run_tool({"inspect", folder_ / "run/global_step5"}).out, Not(HasSubstr("Tensor table")));
}

TEST_F(CheckpointToolTest, InspectPrintsOneJsonObject) {
  write_tag("global_step20");
  const Outcome outcome = run_tool({"inspect", folder_ / "run", "--json", "--tensors"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["format"], "dsengine");
  EXPECT_EQ(report["latest"], "global_step20");
  EXPECT_EQ(report["state"]["global_samples"], 640);
  EXPECT_EQ(report["state"]["optimizer"]["groups"][0]["lr"], 0.25);
  EXPECT_EQ(report["kinds"][0], nlohmann::json({{"name", "buffers"}, {"tensors", 1}, {"bytes", 16}}));
  EXPECT_EQ(report["tensor_table"].size(), 5U);
  EXPECT_EQ(report["tensor_table"][4]["shape"], nlohmann::json({6, 4}));
}

TEST_F(CheckpointToolTest, VerifyNamesFileAndTensorOfDamage) {
  const std::string tag = write_tag("global_step20");
  Outcome outcome = run_tool({"verify", folder_ / "run"});
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("global_step20: whole"));
  const std::string file = a_file_of(tag, "weights");
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(-1, std::ios::end);
  bytes.put('\x55');
  bytes.close();
  outcome = run_tool({"verify", tag});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr(std::filesystem::path(file).filename().string()), HasSubstr("tensor \""),
                                 HasSubstr("damaged, 1 place\n")));
  std::filesystem::remove(tag + "/index.json");
  EXPECT_EQ(run_tool({"verify", tag}).code, 1) << "a tag without index is one that was not finished";
}

TEST_F(CheckpointToolTest, VerifyOfForeignFilesChecksTheirStructure) {
  write_safetensors(folder_ / "model.safetensors", {{"a", torch::ones({3})}});
  Outcome outcome = run_tool({"verify", folder_.path().string()});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("no checksums"), HasSubstr(": readable")));
  std::filesystem::resize_file(folder_ / "model.safetensors", 70);
  outcome = run_tool({"verify", folder_.path().string()});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("model.safetensors"), HasSubstr("truncated"), HasSubstr("damaged")));
}

TEST_F(CheckpointToolTest, WrongUsageAndMissingPathsAreTwo) {
  EXPECT_EQ(run_tool({"verify", folder_ / "absent"}).code, 2);
  EXPECT_THAT(run_tool({"verify", folder_ / "absent"}).err, HasSubstr("absent"));
  EXPECT_EQ(run_tool({"verify", folder_.path().string()}).code, 2) << "an empty folder";
  EXPECT_EQ(run_tool({"inspect", folder_.path().string()}).code, 2);
  EXPECT_EQ(run_tool({}).code, 2);
  EXPECT_EQ(run_tool({"verify"}).code, 2);
  EXPECT_EQ(run_tool({"compare", "a"}).code, 2);
  EXPECT_EQ(run_tool({"--help"}).code, 0);
  write_tag("global_step20");
  std::filesystem::remove(folder_ / "run/latest");
  EXPECT_THAT(run_tool({"inspect", folder_ / "run"}).err, AllOf(HasSubstr("latest"), HasSubstr("global_step20")));
  folder_.write("run/latest", "global_step7");
  EXPECT_THAT(run_tool({"inspect", folder_ / "run"}).err, HasSubstr("global_step7"));
}

TEST_F(CheckpointToolTest, DiffOfTheSameStateOverOtherRanksIsEqual) {
  write_tag("two", 2);
  write_tag("three", 3);
  const Outcome outcome = run_tool({"diff", folder_ / "run/two", folder_ / "run/three"});
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("5 tensors compared: 5 bit-equal"), HasSubstr("\nequal\n")));
}

TEST_F(CheckpointToolTest, DiffPrintsWhatDiffers) {
  write_tag("before");
  at::Tensor weight = source_.tensor("weights/wte.weight").clone();
  weight.fill_(0);
  source_.add("weights/wte.weight", weight);
  write_tag("zero");
  weight = weight.clone();
  weight[2][3] = 0.5;
  weight[1][1] = -0.125;
  source_.add("weights/wte.weight", weight);
  source_.add("weights/ln.weight", torch::zeros({5}), true);
  source_.add("weights/new", torch::zeros({1}));
  source_.mutable_state().global_steps = 21;
  source_.mutable_state().optimizer->groups[0].lr = 0.125;
  source_.mutable_state().client_state["epoch"] = 4;
  write_tag("after");
  const Outcome outcome = run_tool({"diff", folder_ / "run/zero", folder_ / "run/after"});
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("Only in B (1)\n  weights/new\n"), HasSubstr("weights/ln.weight"),
                    ContainsRegex("weights/wte.weight +0.5 +1.0"), ContainsRegex("global_steps +20 +21"),
                    ContainsRegex("optimizer/groups/0/lr +0.25 +0.125"), ContainsRegex("client_state/epoch +3 +4"),
                    HasSubstr("3 bit-equal"), HasSubstr("1 different"), HasSubstr("\ndifferent\n")));
}

TEST_F(CheckpointToolTest, DiffCountsWithinTheToleranceAndNotANumber) {
  const auto write = [&](const std::string& name, const std::vector<float>& values) {
    write_safetensors(folder_ / name, {{"a", torch::tensor(values)}});
  };
  write("a.safetensors", {1.0F, NAN, -2.0F});
  write("b.safetensors", {1.0F, NAN, -2.25F});
  write("c.safetensors", {1.0F, 0.0F, -2.0F});
  const auto diff = [&](const std::string& b, const std::string& tolerance) {
    return run_tool({"diff", folder_ / "a.safetensors", folder_ / b, "--tolerance", tolerance});
  };
  EXPECT_EQ(diff("b.safetensors", "0.2").code, 1);
  EXPECT_EQ(diff("b.safetensors", "0.25").code, 0);
  EXPECT_THAT(diff("b.safetensors", "0.25").out, ContainsRegex("weights/a +0.25 +0.111[0-9]+ +within tolerance"));
  EXPECT_EQ(diff("c.safetensors", "100").code, 1) << "a number is not near what is none";
  EXPECT_EQ(diff("a.safetensors", "0").code, 0);
}

TEST_F(CheckpointToolTest, ConvertedWeightsAreEqualToTheirSource) {
  const std::string tag = write_tag("global_step20");
  const std::string out = folder_ / "out";
  Outcome outcome = run_tool({"convert", folder_ / "run", out});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("3 tensors"), HasSubstr("model.safetensors")));
  EXPECT_TRUE(torch::equal(SafetensorsFile(out + "/model.safetensors").tensor("wte.weight"),
                           source_.tensor("weights/wte.weight")));
  outcome = run_tool({"diff", tag, out, "--weights"});
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("3 tensors compared: 3 bit-equal"));
  EXPECT_EQ(run_tool({"diff", tag, out}).code, 1) << "optimizer and counters are missing";
}

TEST_F(CheckpointToolTest, ConvertTakesItsOptions) {
  const std::string tag = write_tag("global_step20");
  const std::string out = folder_ / "out";
  const std::string map = folder_.write("map.json", R"({"mean": "", "head.weight": "lm_head.weight"})");
  const Outcome outcome =
      run_tool({"convert", tag, out, "--dtype", "bf16", "--max_shard_size", "50B", "--rename", "^(.*)$=model.$1",
                "--rename", R"(^model\.$=)", "--rename_map", map, "--exclude_frozen", "--keep_aliases"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto source = open_weights(out);
  EXPECT_EQ(source->tensors().size(), 2U) << outcome.out;
  EXPECT_TRUE(torch::equal(source->tensor("weights/model.lm_head.weight"),
                           source_.tensor("weights/wte.weight").to(torch::kBFloat16)));
  EXPECT_TRUE(std::filesystem::exists(out + "/model-00002-of-00002.safetensors"));
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{{"--max_shard_size", "big"},
                                                                                     {"--rename", "abc"},
                                                                                     {"--rename", "(=x"},
                                                                                     {"--dtype", "int4"},
                                                                                     {"--format", "onnx"}}) {
    const Outcome refused = run_tool({"convert", tag, folder_ / "wrong", wrong[0], wrong[1]});
    EXPECT_EQ(refused.code, 2) << wrong[1];
    EXPECT_THAT(refused.err, HasSubstr(wrong[0]));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "wrong"));
  }
}

TEST_F(CheckpointToolTest, ConvertWritesAveragesInTheirPlace) {
  const Outcome none = run_tool({"convert", write_tag("global_step20"), folder_ / "none", "--ema"});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("ema/"));
  source_.add(ema_path("wte.weight"), torch::full({6, 4}, 0.25));
  source_.mutable_state().ema_updates = 7;
  const std::string tag = write_tag("global_step30");
  EXPECT_THAT(run_tool({"inspect", tag}).out, ContainsRegex("moving average of weights +7 updates"));
  const std::string out = folder_ / "out";
  const Outcome outcome = run_tool({"convert", tag, out, "--ema", "--keep_aliases"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const SafetensorsFile file(out + "/model.safetensors");
  EXPECT_TRUE(torch::equal(file.tensor("wte.weight"), torch::full({6, 4}, 0.25)));
  EXPECT_TRUE(torch::equal(file.tensor("head.weight"), file.tensor("wte.weight"))) << "tied";
}

TEST_F(CheckpointToolTest, ConvertWritesDsenginesFormatForAnyNumberOfRanks) {
  const std::string tag = write_tag("global_step20");
  const std::string out = folder_ / "again/global_step20";
  const Outcome outcome = run_tool({"convert", tag, out, "--format", "dsengine", "--ranks", "3"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(run_tool({"verify", folder_ / "again"}).code, 0);
  EXPECT_EQ(run_tool({"diff", tag, out}).code, 0);
  EXPECT_EQ(run_tool({"convert", tag, out, "--format", "dsengine", "--dtype", "bf16"}).code, 2);
}

// The model of fill(), as a program without dsengine has it.
struct PlainNetImpl : torch::nn::Module {
  PlainNetImpl() {
    for (const char* name : {"wte", "head"}) register_module(name, with_weight(torch::zeros({6, 4})));
    register_module("ln", with_weight(torch::zeros({4})));
    register_module("act", torch::nn::GELU());
    register_buffer("mean", torch::zeros({4}));
  }
  static std::shared_ptr<torch::nn::Module> with_weight(const at::Tensor& values) {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("weight", values);
    return module;
  }
};
TORCH_MODULE(PlainNet);

TEST_F(CheckpointToolTest, ConvertWritesAFileThatTorchLoads) {
  source_.add("weights/ln.weight", source_.tensor("weights/ln.weight").to(torch::kBFloat16), /*frozen=*/true);
  const auto expect_loaded = [&](const std::string& file) {
    PlainNet plain;
    torch::load(plain, file);
    const auto weights = plain->named_parameters();
    EXPECT_TRUE(torch::equal(weights["wte.weight"], source_.tensor("weights/wte.weight")));
    EXPECT_TRUE(torch::equal(weights["head.weight"], source_.tensor("weights/wte.weight")));
    EXPECT_EQ(weights["ln.weight"].scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(weights["ln.weight"], source_.tensor("weights/ln.weight").to(torch::kFloat)));
    EXPECT_TRUE(torch::equal(plain->named_buffers()["mean"], source_.tensor("buffers/mean")));
  };
  const std::string file = folder_ / "model.pt";
  Outcome outcome = run_tool({"convert", write_tag("unnamed"), file, "--format", "torch", "--empty_modules", "act"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("4 tensors"), HasSubstr("torch::load(model"), Not(HasSubstr("name them"))));
  expect_loaded(file);

  source_.mutable_state().empty_modules = {{"act"}};
  outcome = run_tool({"convert", write_tag("named"), file, "--format", "torch"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  expect_loaded(file);
  outcome = run_tool({"convert", folder_ / "run/unnamed", folder_ / "lacks.pt", "--format", "torch"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("name them by --empty_modules"));

  for (const auto& [name, to] : {std::pair("--rename", "^mean$=wte.weight"), std::pair("--rename", "^mean$=wte"),
                                 std::pair("--rename", "^mean$=a..b"), std::pair("--rename", "^mean$=a.")}) {
    outcome = run_tool({"convert", folder_ / "run/named", folder_ / "wrong.pt", "--format", "torch", name, to});
    EXPECT_EQ(outcome.code, 2) << to;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "wrong.pt")) << to;
  }
  EXPECT_THAT(run_tool({"convert", folder_ / "run/named", folder_ / "out", "--empty_modules", "act"}).err,
              HasSubstr("--empty_modules is for --format torch"));
}

TEST_F(CheckpointToolTest, ConvertWritesDeepSpeedsUniversalLayout) {
  source_.add("weights/ln.weight", torch::ones({4}), /*frozen=*/true);
  const std::string tag = write_tag("global_step20");
  const Outcome outcome = run_tool({"convert", tag, folder_ / "uni/step20/", "--format", "universal"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("load_universal"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "uni/step20/zero/wte.weight/exp_avg_sq.pt"));
  EXPECT_EQ(run_tool({"convert", tag, folder_ / "uni/step20", "--format", "universal", "--exclude_frozen"}).code, 2);
}

// Masters and states of 16 bits: files keep their dtype, DeepSpeed's layout has float32.
TEST_F(CheckpointToolTest, MastersOf16Bits) {
  const at::Tensor weight = torch::randn({6, 4}).to(torch::kBFloat16);
  source_.add("weights/wte.weight", weight);
  source_.add("weights/ln.weight", torch::ones({4}).to(torch::kBFloat16), /*frozen=*/true);
  for (const char* state : {"exp_avg", "exp_avg_sq"}) {
    source_.add(state_path(state, "wte.weight"), torch::rand({6, 4}).to(torch::kBFloat16));
  }
  const std::string tag = write_tag("global_step20");
  const Outcome inspected = run_tool({"inspect", tag, "--tensors"});
  EXPECT_THAT(inspected.out, AllOf(ContainsRegex("weights/wte.weight +BFloat16"), ContainsRegex("weights +2 +56 B\n"),
                                   ContainsRegex("optimizer/exp_avg +1 +48 B\n")));
  const std::string again = folder_ / "again/global_step20";
  ASSERT_EQ(run_tool({"convert", tag, again, "--format", "dsengine", "--world_size", "3"}).code, 0);
  const Outcome same = run_tool({"diff", tag, again});
  EXPECT_EQ(same.code, 0) << same.out;
  EXPECT_EQ(open_folder(again)->info("weights/wte.weight").dtype, at::kBFloat16);
  const std::string universal = folder_ / "uni/step20";
  const Outcome converted = run_tool({"convert", tag, universal, "--format", "universal"});
  ASSERT_EQ(converted.code, 0) << converted.err;
  const auto value_of = [&](const std::string& file) {
    const std::string bytes = test::file_text(universal + "/zero/wte.weight/" + file);
    return torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict().at("param").toTensor();
  };
  EXPECT_EQ(value_of("fp32.pt").scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(value_of("fp32.pt"), weight.to(torch::kFloat)));
  EXPECT_TRUE(
      torch::equal(value_of("exp_avg.pt"), source_.tensor(state_path("exp_avg", "wte.weight")).to(torch::kFloat)));
}

// What four ranks of a tensor axis wrote is the same checkpoint.
TEST_F(CheckpointToolTest, TensorsInParts) {
  // All are trained: pieces of this test are not frozen.
  source_.add("weights/ln.weight", source_.tensor("weights/ln.weight"));
  for (const char* name : {"exp_avg", "exp_avg_sq"}) source_.add(state_path(name, "ln.weight"), torch::ones({4}));
  std::vector<SplitTensor> tensors;
  for (const auto& [path, info] : source_.tensors()) {
    const bool split = path.ends_with("wte.weight");
    tensors.push_back({.path = path, .values = source_.tensor(path), .cut = {.dim = 0}, .count = split ? 4 : 0});
  }
  TrainingState state = source_.state();
  state.tensor_ranks = 4;
  std::filesystem::create_directory(folder_.path() / "split");
  const std::string split = folder_ / "split/global_step20";
  write_split_folder(tensors, split, 4, 1, state, source_.aliases());
  const std::string tag = write_tag("global_step20");
  EXPECT_EQ(run_tool({"verify", split}).code, 0);
  EXPECT_THAT(run_tool({"inspect", split}).out, ContainsRegex("tensor ranks +4\n"));
  const Outcome diff = run_tool({"diff", tag, split});
  EXPECT_EQ(diff.code, 0) << diff.out << diff.err;
  EXPECT_THAT(diff.out, HasSubstr("7 tensors compared: 7 bit-equal"));
  const std::string out = folder_ / "out";
  ASSERT_EQ(run_tool({"convert", split, out}).code, 0);
  EXPECT_TRUE(torch::equal(SafetensorsFile(out + "/model.safetensors").tensor("wte.weight"),
                           source_.tensor("weights/wte.weight")));
  for (const std::string& from : {tag, split}) {
    const std::string to = folder_ / (from == tag ? "uni/whole" : "uni/split");
    ASSERT_EQ(run_tool({"convert", from, to, "--format", "universal"}).code, 0);
  }
  EXPECT_EQ(test::file_text(folder_ / "uni/whole/zero/wte.weight/exp_avg.pt"),
            test::file_text(folder_ / "uni/split/zero/wte.weight/exp_avg.pt"));
}

TEST(CheckpointToolExported, ShowsInputsTensorsAndOperators) {
  const std::string data = std::string(DS_SOURCE_DIR) + "/tests/exported/data/";
  const Outcome gpt = run_tool({"inspect", data + "gpt.pt2", "--tensors"});
  EXPECT_EQ(gpt.code, 0) << gpt.err;
  EXPECT_THAT(gpt.out, ContainsRegex("Program \"model\", exported by torch 2.11.0[^,]*, schema 8.17"));
  EXPECT_THAT(gpt.out, ContainsRegex("tokens +Long +\\[s[0-9]+: 2 to 1024, s[0-9]+: 2 to 16\\]"));
  EXPECT_THAT(gpt.out, ContainsRegex("parameters, Float +29 "));
  EXPECT_THAT(gpt.out, ContainsRegex("wte.weight +is head.weight"));
  EXPECT_THAT(gpt.out, ContainsRegex("aten.scaled_dot_product_attention.default +2"));
  EXPECT_THAT(gpt.out, ContainsRegex("h.1.fc.weight +Float +\\[64,16\\]"));
  EXPECT_THAT(gpt.out, Not(HasSubstr("not in this LibTorch")));
  const Outcome llama = run_tool({"inspect", data + "hf_llama.pt2", "--json"});
  ASSERT_EQ(llama.code, 0) << llama.err;
  const auto report = nlohmann::json::parse(llama.out).at("programs").at(0);
  EXPECT_EQ(report.at("outputs"), nlohmann::json({"loss", "logits"}));
  EXPECT_EQ(report.at("inputs").at(1).at("name"), "labels");
}

TEST(CheckpointToolText, SizesReadAndShown) {
  EXPECT_EQ(parsed_bytes("5GB"), 5'000'000'000);
  EXPECT_EQ(parsed_bytes("1.5 MB"), 1'500'000);
  EXPECT_EQ(parsed_bytes("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(parsed_bytes("77"), 77);
  EXPECT_EQ(parsed_bytes("5e9"), 5'000'000'000);
  for (const char* wrong : {"", "GB", "5 apples", "0", "-1GB"}) {
    EXPECT_THROW(parsed_bytes(wrong), ConfigError) << wrong;
  }
  EXPECT_EQ(shown_bytes(999), "999 B");
  EXPECT_EQ(shown_bytes(1234567), "1.2 MB");
  EXPECT_EQ(shown_bytes(999'960'000), "1.0 GB");
}

}  // namespace
}  // namespace ds::checkpoint::tool
