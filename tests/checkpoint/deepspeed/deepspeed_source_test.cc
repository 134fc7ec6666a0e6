// Checkpoints that DeepSpeed wrote (tests/checkpoint/deepspeed_fixtures.py), against what its own API said of them.
#include "checkpoint/deepspeed/deepspeed_source.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/deepspeed/layout.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/checkpoint.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kFixtures = fs::path(DS_SOURCE_DIR) / "tests/checkpoint/deepspeed_fixtures";

std::string saved(const std::string& name) { return (kFixtures / name / "saved").string(); }

nlohmann::json expected_json(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(kFixtures / name / "expected.json"));
}

class DeepspeedCheckpoint : public testing::TestWithParam<const char*> {
 protected:
  const std::string name_ = GetParam();
  const std::unique_ptr<Source> source_ = open(saved(name_));
  const nlohmann::json expected_ = expected_json(name_);
  const SafetensorsFile tensors_{(kFixtures / name_ / "expected.safetensors").string()};
};

TEST_P(DeepspeedCheckpoint, TensorsAreEqualBitForBit) {
  std::set<std::string> expected, found;
  for (const SafetensorsFile::Entry& entry : tensors_.entries()) expected.insert(entry.name);
  for (const auto& [path, info] : source_->tensors()) found.insert(path);
  EXPECT_EQ(found, expected);
  for (const std::string& path : expected) {
    const at::Tensor wanted = tensors_.tensor(path);
    const at::Tensor read = source_->tensor(path);
    EXPECT_EQ(read.scalar_type(), wanted.scalar_type()) << path;
    EXPECT_TRUE(at::equal(read, wanted)) << path;
  }
}

TEST_P(DeepspeedCheckpoint, AnyPartCanBeRead) {
  for (const auto& [path, info] : source_->tensors()) {
    const at::Tensor whole = tensors_.tensor(path).reshape({-1}).to(at::kDouble);
    for (int64_t begin = 0; begin < whole.numel(); begin += 5) {
      for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{37}, whole.numel() - begin}) {
        if (begin + numel > whole.numel()) continue;
        const at::Tensor part = at::full({numel}, -1.0, at::kDouble);
        source_->read(path, begin, part);
        EXPECT_TRUE(at::equal(part, whole.narrow(0, begin, numel))) << path << " " << begin << " " << numel;
      }
    }
    EXPECT_THROW(source_->read(path, 1, at::empty({whole.numel()})), IoError);
    EXPECT_THROW(source_->read(path, -1, at::empty({1})), IoError);
  }
  EXPECT_THROW(source_->read("weights/none", 0, at::empty({1})), IoError);
}

TEST_P(DeepspeedCheckpoint, NamesTiedAndFrozenParameters) {
  EXPECT_EQ(source_->aliases(), (std::map<std::string, std::string>{{"head.weight", "embed.weight"}}));
  for (const auto& [path, info] : source_->tensors()) EXPECT_EQ(info.frozen, path == "weights/shift") << path;
}

TEST_P(DeepspeedCheckpoint, StateIsThatOfTheJob) {
  const TrainingState& state = source_->state();
  EXPECT_EQ(state.global_steps, expected_["global_steps"]);
  EXPECT_EQ(state.global_samples, expected_["global_samples"]);
  EXPECT_EQ(state.micro_steps, expected_["global_steps"]);
  EXPECT_EQ(state.skipped_steps, expected_["skipped_steps"]);
  EXPECT_EQ(state.world_size, expected_["ranks"]);
  EXPECT_EQ(state.zero_stage, expected_["stage"]);
  const std::map<std::string, std::string> names = {{"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}};
  EXPECT_EQ(state.precision, names.at(expected_["precision"].get<std::string>()));
  EXPECT_EQ(state.config["zero_optimization"]["stage"], expected_["stage"]);
  EXPECT_EQ(state.config["optimizer"]["params"]["betas"], nlohmann::json::parse("[0.9, 0.99]"));
  EXPECT_EQ(state.client_state,
            nlohmann::json::parse(R"({"note": "a program's own", "epochs": [1, 2.5, null, true]})"));
  EXPECT_FALSE(state.data);
}

TEST_P(DeepspeedCheckpoint, OptimizerIsThatOfTheJob) {
  ASSERT_TRUE(source_->state().optimizer);
  const OptimizerState& optimizer = *source_->state().optimizer;
  EXPECT_EQ(optimizer.type, "AdamW");
  // DeepSpeed's 16-bit optimizer of stage 0 makes an update by zeros when it begins.
  const int64_t first = name_ == "stage0_bf16" ? 1 : 0;
  const auto applied = expected_["global_steps"].get<int64_t>() - expected_["skipped_steps"].get<int64_t>();
  EXPECT_EQ(optimizer.step_count, first + applied);
  ASSERT_EQ(optimizer.groups.size(), expected_["groups"].size());
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    const nlohmann::json& group = expected_["groups"][g];
    EXPECT_EQ(optimizer.groups[g].lr, group["lr"]);
    EXPECT_EQ(optimizer.groups[g].weight_decay, group["weight_decay"]);
    EXPECT_EQ(optimizer.groups[g].beta1, group["beta1"]);
    EXPECT_EQ(optimizer.groups[g].beta2, group["beta2"]);
    EXPECT_EQ(optimizer.groups[g].eps, group["eps"]);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DeepspeedCheckpoint,
                         testing::Values("stage0_fp32", "stage0_bf16", "stage0_plateau", "stage1_fp32", "stage1_bf16",
                                         "stage2_fp32", "stage2_bf16", "stage2_fp16", "stage3_fp32", "stage3_bf16"),
                         [](const auto& test_case) { return std::string(test_case.param); });

TEST(DeepspeedSource, ReadsTheLossScaler) {
  EXPECT_FALSE(open(saved("stage2_bf16"))->state().loss_scaler);
  const auto scaler = open(saved("stage2_fp16"))->state().loss_scaler;
  ASSERT_TRUE(scaler);
  EXPECT_EQ(scaler->scale, expected_json("stage2_fp16")["loss_scale"]);
  EXPECT_EQ(scaler->iteration, 4);
  EXPECT_EQ(scaler->last_overflow_iteration, 1);
  EXPECT_EQ(scaler->remaining_hysteresis, 1);
}

TEST(DeepspeedSource, ReadsTheSchedule) {
  EXPECT_EQ(open(saved("stage1_fp32"))->state().lr_iteration, 3);
  EXPECT_FALSE(open(saved("stage2_fp32"))->state().lr_iteration);
  EXPECT_FALSE(open(saved("stage1_fp32"))->state().plateau);
  const auto plateau = open(saved("stage0_plateau"))->state().plateau;
  ASSERT_TRUE(plateau);
  EXPECT_EQ(plateau->best, 2.6235852241516113);
  EXPECT_EQ(plateau->bad_values, 3);
  EXPECT_EQ(plateau->cooldown, 0);
  EXPECT_EQ(plateau->values, 4);
}

// --- what is missing or too much -------------------------------------------------------------------------------------

class DamagedFolder : public testing::Test {
 protected:
  // A copy of a fixture, to be damaged.
  const test::ScratchFolder scratch_;
  fs::path copy_of(const std::string& name) {
    const fs::path tag = scratch_.path() / "save_dir" / "tag";
    fs::remove_all(tag);
    fs::create_directories(tag.parent_path());
    fs::copy(saved(name), tag, fs::copy_options::recursive);
    for (const auto& entry : fs::directory_iterator(tag)) {
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
    }
    return tag;
  }

  static std::string error_of(const fs::path& folder) {
    return test::thrown_by<IoError>([&] { open(folder.string()); });
  }
};

TEST_F(DamagedFolder, NamesTheMissingRank) {
  for (const char* name : {"stage1_fp32", "stage2_fp32", "stage3_fp32"}) {
    fs::path tag = copy_of(name);
    fs::remove(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt");
    EXPECT_THAT(error_of(tag), HasSubstr("optim_states.pt")) << name;
    tag = copy_of(name);
    fs::remove(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt");
    EXPECT_THAT(error_of(tag), HasSubstr("no optim_states.pt file of rank 0")) << name;
  }
  fs::path tag = copy_of("stage3_fp32");
  fs::remove(tag / "zero_pp_rank_1_mp_rank_00_model_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("1 model_states.pt files, expected 2"));
  tag = copy_of("stage2_fp32");
  fs::remove(tag / "mp_rank_00_model_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("no mp_rank_00_model_states.pt"));
  tag = copy_of("stage2_bf16");
  for (const char* rank : {"0", "1"}) fs::remove(tag / cat("bf16_zero_pp_rank_", rank, "_mp_rank_00_optim_states.pt"));
  EXPECT_THAT(error_of(tag), HasSubstr("0 optim_states.pt files, expected 2"));
}

TEST_F(DamagedFolder, RefusesFilesOfAnotherSave) {
  fs::path tag = copy_of("stage1_fp32");
  fs::copy_file(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("3 optim_states.pt files, expected 2"));
  tag = copy_of("stage1_fp32");
  fs::copy_file(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("more than one checkpoint"));
  tag = copy_of("stage2_fp16");
  fs::copy_file(fs::path(saved("stage1_fp32")) / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of(tag), HasSubstr("zero_stage 1, expected that of rank 0"));
  tag = copy_of("stage3_fp32");
  fs::copy_file(fs::path(saved("stage1_fp32")) / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("more than one checkpoint"));
}

TEST_F(DamagedFolder, ChecksThatSizesAddUp) {
  // The same ranks' files with one group of parameters instead of two.
  const fs::path tag = copy_of("stage2_fp16");
  fs::copy_file(fs::path(saved("stage2_bf16")) / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt",
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of(tag), HasSubstr("2 flat tensors, expected 1"));
}

TEST_F(DamagedFolder, NamesWhatItDoesNotRead) {
  const auto with = [this](const std::string& name) {
    const fs::path tag = copy_of("stage1_fp32");
    fs::copy_file(tag / "mp_rank_00_model_states.pt", tag / name);
    return error_of(tag);
  };
  EXPECT_THAT(with("layer_01-model_states.pt"), HasSubstr("layer_01-model_states.pt: of a pipeline, beside "));
  EXPECT_THAT(with("layer_01-model_1x-model_states.pt"), HasSubstr("not a file name of DeepSpeed's"));
  EXPECT_THAT(with("layer_0_expert_3_mp_rank_00_model_states.pt"), HasSubstr("with experts"));
  EXPECT_THAT(with("expp_rank_0_mp_rank_00_optim_states.pt"), HasSubstr("with experts"));
  EXPECT_THAT(with("mp_rank_01_model_states.pt"),
              HasSubstr("written by 1 ranks of pipeline and model parallelism, the folder has files of 2"));
  EXPECT_THAT(with("mp_rank_02_model_states.pt"), HasSubstr("no file of mp_rank 1, but of mp_rank 2"));
  EXPECT_THAT(with("other_model_states.pt"), HasSubstr("not a file name of DeepSpeed's"));
}

TEST_F(DamagedFolder, SurvivesTruncatedAndFlippedFiles) {
  const std::map<std::string, std::vector<std::string>> files = {
      {"stage0_fp32", {"mp_rank_00_model_states.pt"}},
      {"stage2_fp16", {"mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"}},
      {"stage3_fp32", {"zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}}};
  for (const auto& [name, damaged_files] : files) {
    for (const std::string& file : damaged_files) {
      const fs::path tag = copy_of(name);
      std::string whole(fs::file_size(tag / file), '\0');
      std::ifstream(tag / file, std::ios::binary).read(whole.data(), static_cast<std::streamsize>(whole.size()));
      const auto write = [&](const std::string& content) { std::ofstream(tag / file, std::ios::binary) << content; };
      for (size_t bytes = 0; bytes < whole.size(); bytes += 1009) {
        write(whole.substr(0, bytes));
        EXPECT_THAT(error_of(tag), HasSubstr(file)) << bytes;
      }
      // Without its checksum (the first one of the directory) the pickle itself has to hold.
      std::string unchecked = whole;
      const size_t directory = whole.find("PK\x01\x02");
      ASSERT_NE(directory, std::string::npos);
      unchecked.replace(directory + 16, 4, 4, '\0');
      const size_t begin = unchecked.find("\x80\x02}");
      ASSERT_NE(begin, std::string::npos);
      for (size_t at = begin; at < begin + 2000; at += 5) {
        std::string damaged = unchecked;
        damaged[at] = static_cast<char>(damaged[at] ^ (at % 2 == 0 ? 0xff : 1 << at % 8));
        write(damaged);
        try {
          const std::unique_ptr<Source> source = open(tag.string());
          for (const auto& [path, info] : source->tensors()) source->tensor(path);
        } catch (const IoError&) {
        }
      }
    }
  }
}

// --- pipelines and model-parallel ranks (tests/checkpoint/deepspeed_3d_fixtures.py) ----------------------------------

TEST(DeepspeedPipeline, JoinsStagesAndModelParallelRanks) {
  const std::unique_ptr<Source> source = open(saved("pipe2_model2"));
  const SafetensorsFile wanted((kFixtures / "pipe2_model2" / "expected.safetensors").string());
  std::set<std::string> names, found;
  for (const SafetensorsFile::Entry& entry : wanted.entries()) names.insert(entry.name);
  for (const auto& [path, info] : source->tensors()) found.insert(path);
  ASSERT_EQ(found, names);
  for (const std::string& path : names) {
    const at::Tensor whole = wanted.tensor(path);
    EXPECT_TRUE(at::equal(source->tensor(path), whole)) << path;
    const at::Tensor flat = whole.reshape({-1});
    for (int64_t begin = 0; begin < flat.numel(); begin += 5) {
      for (const int64_t numel : {int64_t{1}, int64_t{11}, flat.numel() - begin}) {
        if (begin + numel > flat.numel()) continue;
        const at::Tensor part = at::empty({numel}, flat.options());
        source->read(path, begin, part);
        EXPECT_TRUE(at::equal(part, flat.narrow(0, begin, numel))) << path << " " << begin << " " << numel;
      }
    }
    EXPECT_FALSE(source->info(path).frozen) << path;
  }
}

TEST(DeepspeedPipeline, StateIsThatOfTheJob) {
  const std::unique_ptr<Source> source = open(saved("pipe2_model2"));
  const TrainingState& state = source->state();
  const nlohmann::json expected = expected_json("pipe2_model2");
  EXPECT_EQ(state.global_steps, expected["global_steps"]);
  EXPECT_EQ(state.global_samples, expected["global_samples"]);
  EXPECT_EQ(state.world_size, 8);
  EXPECT_EQ(state.pipeline_stages, 2);
  EXPECT_EQ(state.tensor_ranks, 2);
  EXPECT_EQ(state.zero_stage, 1);
  EXPECT_EQ(state.precision, "float32");
  ASSERT_TRUE(state.optimizer);
  EXPECT_EQ(state.optimizer->type, "AdamW");
  EXPECT_EQ(state.optimizer->step_count, 3);
  EXPECT_EQ(state.client_state, nlohmann::json::parse(R"({"note": "own"})"));
}

TEST_F(DamagedFolder, NamesFileAndLayerOfAPipeline) {
  fs::path tag = copy_of("pipe2_model2");
  fs::remove(tag / "layer_02-model_01-model_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("layer 2 has files of 1 model-parallel ranks, layer 0 of 2"));
  tag = copy_of("pipe2_model2");
  for (const char* rank : {"00", "01"}) fs::remove(tag / cat("layer_02-model_", rank, "-model_states.pt"));
  EXPECT_THAT(error_of(tag), HasSubstr("no file of layer 2 (layer_02[-model_MM]-model_states.pt)"));
  tag = copy_of("pipe2_model2");
  fs::copy_file(tag / "layer_02-model_00-model_states.pt", tag / "layer_03-model_00-model_states.pt",
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of(tag), AllOf(HasSubstr("layer_03-model_00-model_states.pt"),
                                   HasSubstr("layer 3: \"3.weight\" has the shape [8, 6]"), HasSubstr("[6, 4]")));
  for (const char* rank : {"00", "01"}) {  // has a bias, which layer 0 of the other rank has not
    tag = copy_of("pipe2_model2");
    fs::copy_file(tag / "layer_02-model_00-model_states.pt", tag / cat("layer_00-model_", rank, "-model_states.pt"),
                  fs::copy_options::overwrite_existing);
    EXPECT_THAT(error_of(tag), HasSubstr(": has no \"weights/0.bias\", which ")) << rank;
  }
  tag = copy_of("pipe2_model2");
  fs::remove(tag / "mp_rank_03_model_states.pt");
  EXPECT_THAT(error_of(tag), HasSubstr("no mp_rank_03_model_states.pt"));
  tag = copy_of("pipe2_model2");
  for (const auto& entry : fs::directory_iterator(tag)) {
    if (entry.path().filename().string().starts_with("layer_")) fs::remove(entry.path());
  }
  EXPECT_THAT(error_of(tag), HasSubstr("no layer_LL-model_states.pt of a pipeline's layers"));
}

TEST_F(DamagedFolder, AsksHowPartsAreJoined) {
  const fs::path tag = copy_of("pipe2_model2");
  const fs::path file = tag / "mp_rank_00_model_states.pt";
  std::string whole(fs::file_size(file), '\0');
  std::ifstream(file, std::ios::binary).read(whole.data(), static_cast<std::streamsize>(whole.size()));
  // The key, and the checksum of the pickle, which zeros leave out.
  const size_t key = whole.find("universal_checkpoint_info");
  const size_t directory = whole.find("PK\x01\x02");
  ASSERT_TRUE(key != std::string::npos && directory != std::string::npos);
  whole.replace(key, 9, "anotherXX");
  whole.replace(directory + 16, 4, 4, '\0');
  std::ofstream(file, std::ios::binary) << whole;
  EXPECT_THAT(error_of(tag),
              AllOf(HasSubstr("mp_rank_00_model_states.pt: \"optimizer/exp_avg/2.bias\": parts of shape [8] on 2"),
                    HasSubstr("universal_checkpoint_info")));
}

// --- what a folder is ------------------------------------------------------------------------------------------------

TEST_F(DamagedFolder, SaysWhichTagToName) {
  const fs::path tag = copy_of("stage1_fp32");
  EXPECT_THAT(error_of(tag.parent_path()), HasSubstr("name one of its tags: tag"));
  scratch_.write("save_dir/latest", "tag");
  EXPECT_THAT(error_of(tag.parent_path()), HasSubstr((tag.parent_path() / "tag").string()));
}

TEST_F(DamagedFolder, SaysWhatWasLookedForAndWhatIsThere) {
  scratch_.write("weights/notes.txt", "");
  const std::string error = error_of(scratch_.path() / "weights");
  EXPECT_THAT(error, HasSubstr("index.json"));
  EXPECT_THAT(error, HasSubstr("*_model_states.pt"));
  EXPECT_THAT(error, HasSubstr("model.safetensors"));
  EXPECT_THAT(error, HasSubstr("found notes.txt"));
  EXPECT_THAT(error_of(scratch_.path() / "absent"), HasSubstr("no such file or folder"));
  EXPECT_THAT(error_of(scratch_.path() / "weights/notes.txt"), HasSubstr("a .safetensors file"));
}

// --- names by order --------------------------------------------------------------------------------------------------

using Wanted = std::vector<std::vector<std::optional<Sizes>>>;
using Found = std::vector<std::vector<size_t>>;

TEST(ParameterMatch, FollowsOrderAndSizes) {
  const std::vector<NamedSizes> module = {{"a", {2, 3}}, {"b", {2}}, {"c", {3, 3}}, {"d", {3}}};
  EXPECT_EQ(match_parameters(module, Wanted{{Sizes{2, 3}, Sizes{2}, Sizes{3, 3}, Sizes{3}}}, "f"),
            (Found{{0, 1, 2, 3}}));
  EXPECT_EQ(match_parameters(module, Wanted{{Sizes{2, 3}, Sizes{3, 3}}, {Sizes{2}, Sizes{3}}}, "f"),
            (Found{{0, 2}, {1, 3}}));
  EXPECT_EQ(match_parameters(module, Wanted{{Sizes{3, 3}}, {Sizes{2}}}, "f"), (Found{{2}, {1}}));
  EXPECT_EQ(match_parameters(module, Wanted{{Sizes{2, 3}, std::nullopt, Sizes{3, 3}, std::nullopt}}, "f"),
            (Found{{0, 1, 2, 3}}));
  EXPECT_EQ(match_parameters({}, Wanted{{}}, "f"), Found{{}});
}

TEST(ParameterMatch, RefusesToGuess) {
  const std::vector<NamedSizes> module = {{"a", {3}}, {"b", {2}}, {"c", {3}}};
  const auto error = [&](const Wanted& wanted) -> std::string {
    try {
      match_parameters(module, wanted, "file.pt");
    } catch (const IoError& thrown) {
      return thrown.what();
    }
    return "no error";
  };
  EXPECT_THAT(error({{Sizes{3}}}),
              HasSubstr("file.pt: its 1 parameters can be matched with the 3 of the module in more"));
  EXPECT_THAT(error({{Sizes{3}}, {Sizes{3}}}), HasSubstr("in more than one way")) << "either group may come first";
  EXPECT_THAT(error({{Sizes{2}, Sizes{2}}}), HasSubstr("do not have the sizes"));
  EXPECT_THAT(error({{Sizes{2}, Sizes{3}, Sizes{3}}}), HasSubstr("do not have the sizes"));
}

TEST(ParameterMatch, ManyEqualLayersTakeNoTime) {
  std::vector<NamedSizes> module;
  Wanted wanted(2);
  for (int layer = 0; layer < 2000; ++layer) {
    module.push_back({cat(layer, ".weight"), {8, 8}});
    module.push_back({cat(layer, ".bias"), {8}});
    wanted[0].emplace_back(Sizes{8, 8});
    wanted[1].emplace_back(Sizes{8});
  }
  EXPECT_EQ(match_parameters(module, wanted, "f")[1].back(), 3999);
}

}  // namespace
}  // namespace ds::checkpoint
