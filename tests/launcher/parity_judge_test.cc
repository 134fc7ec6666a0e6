// What `ds-launch parity` says of recorded runs: nothing where they agree, and the likely cause of each mistake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/parity/parity_bounds.h"
#include "core/parity/parity_judge.h"
#include "core/parity/parity_names.h"
#include "core/parity/recorded_run.h"
#include "launcher/parity/parity_command.h"
#include "tests/support/scratch_folder.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Values = std::map<std::string, std::vector<float>>;

void write_tensors(const std::string& path, const Values& values) {
  nlohmann::ordered_json header;
  std::string data;
  for (const auto& [name, numbers] : values) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", {numbers.size()}}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << text << data;
}

// Two steps of a model of three parameters on two data-parallel ranks with an accumulation of three.
struct Training {
  std::vector<std::vector<std::vector<double>>> losses;  // by step, rank, micro-batch
  std::vector<double> mean, norm;                        // by step
  std::vector<Values> tensors;                           // of steps 0, 1 and 2
};

constexpr int64_t kRanks = 2;
constexpr int64_t kAccumulation = 3;

std::vector<float> wave(double from, double scale) {
  std::vector<float> numbers;
  for (int i = 0; i < 40; ++i) numbers.push_back(static_cast<float>(std::sin(from + i) * scale));
  return numbers;
}

void scale(std::vector<float>& numbers, float by) {
  for (float& number : numbers) number *= by;
}

Training right_run() {
  Training run{.losses = {}, .mean = {}, .norm = {}, .tensors = {Values()}};
  const std::vector<std::string> names = {"first.weight", "norm.bias", "last.weight"};
  for (size_t p = 0; p < names.size(); ++p) run.tensors[0]["weight/" + names[p]] = wave(static_cast<double>(p), 0.3);
  for (int step = 1; step <= 2; ++step) {
    Values values;
    for (size_t p = 0; p < names.size(); ++p) {
      std::vector<float> gradient = wave(1.7 * step + static_cast<double>(p), 0.1);
      std::vector<float> weight = run.tensors.back()["weight/" + names[p]];
      for (size_t i = 0; i < weight.size(); ++i) weight[i] -= 0.1F * gradient[i];
      values["gradient/" + names[p]] = gradient;
      values["weight/" + names[p]] = weight;
    }
    run.tensors.push_back(values);
    run.losses.push_back({{1.0, 1.1, 1.2}, {1.3, 1.4, 1.5}});
    run.mean.push_back(1.25);
    run.norm.push_back(0.8);
  }
  return run;
}

RecordedRun record(const Training& run, const std::string& folder) {
  std::filesystem::create_directories(folder);
  for (size_t step = 0; step < run.tensors.size(); ++step) {
    write_tensors(folder + "/" + parity_step_file(static_cast<int64_t>(step), 0), run.tensors[step]);
  }
  RecordedRun result{.folder = folder,
                     .layout = {.data_ranks = kRanks, .accumulation = kAccumulation, .tensor_ranks = 1, .stage = 2},
                     .steps = {}};
  for (size_t step = 0; step < run.losses.size(); ++step) {
    result.steps.push_back({.losses = run.losses[step], .loss = run.mean[step], .norm = run.norm[step]});
  }
  return result;
}

// The verdict on the right run with a mistake.
ParityVerdict verdict_with(const std::function<void(Training&)>& mistake) {
  const test::ScratchFolder folder;
  Training reference = right_run();
  for (auto& losses : reference.losses) losses = {{1.0, 1.3, 1.1, 1.4, 1.2, 1.5}};
  Training wrong = right_run();
  mistake(wrong);
  const std::string path = folder.path().string();
  const RecordedRun run = record(wrong, path + "/layout");
  const RecordedRun one_rank = record(reference, path + "/one_rank");
  return judge_parity(run, one_rank, choose_bounds(run, one_rank, nullptr));
}

void expect_told(const std::function<void(Training&)>& mistake, const std::vector<std::string>& parts) {
  const ParityVerdict verdict = verdict_with(mistake);
  EXPECT_FALSE(verdict.equal);
  for (const std::string& part : parts) EXPECT_THAT(verdict.text, HasSubstr(part));
}

std::vector<float>& gradient(Training& run, const std::string& name, size_t step = 1) {
  return run.tensors[step]["gradient/" + name];
}

TEST(ParityJudge, RoundingIsEqual) {
  const ParityVerdict verdict = verdict_with([](Training& run) {
    for (Values& values : run.tensors) {
      for (auto& item : values) scale(item.second, 1.0000003F);
    }
    run.mean[0] *= 1.000001;
  });
  EXPECT_TRUE(verdict.equal) << verdict.text;
  EXPECT_THAT(verdict.text, AllOf(HasSubstr("parity: equal, 2 ranks (2 data-parallel, stage 2, fp32)"),
                                  HasSubstr("2 steps, 3 parameters"),
                                  HasSubstr("0.002, a constant of fp32: no second run was asked for")));
}

// The right run whose gradients of step 1 are `by` times as large.
RecordedRun scaled_run(double by, const std::string& folder) {
  Training run = right_run();
  for (auto& item : run.tensors[1]) {
    if (item.first.starts_with("gradient/")) scale(item.second, static_cast<float>(by));
  }
  return record(run, folder);
}

TEST(ParityBounds, AreAMultipleOfTheDistanceOfASecondOrder) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  const RecordedRun run = scaled_run(1, path + "/layout");
  const RecordedRun one_rank = scaled_run(1, path + "/one_rank");
  const RecordedRun near = scaled_run(1.0005, path + "/near");
  const ChosenBounds bounds = choose_bounds(run, one_rank, &near);
  EXPECT_THAT(bounds.source, HasSubstr("from a second run"));
  EXPECT_NEAR(bounds.steps[0].gradient, 8 * 0.0005, 1e-4);
  EXPECT_NEAR(bounds.steps[1].gradient, 8 * 0.0005, 1e-4);  // what was apart stays apart
  // None is finer than rounding: a tenth of the dtype's.
  EXPECT_NEAR(bounds.steps[0].loss, 1e-5, 1e-9);
}

TEST(ParityBounds, AreTheDtypesWhereASecondOrderTellsNothing) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  const RecordedRun run = scaled_run(1, path + "/layout");
  RecordedRun one_rank = scaled_run(1, path + "/one_rank");
  const auto chosen = [&](const RecordedRun& other) { return choose_bounds(run, one_rank, &other); };
  const ChosenBounds same = chosen(run);
  EXPECT_THAT(same.source, HasSubstr("a constant of fp32: a second run is the same to the bit"));
  EXPECT_EQ(same.steps[0].gradient, 2e-3);
  EXPECT_EQ(same.steps[1].gradient, 8e-3);
  EXPECT_THAT(chosen(scaled_run(1.2, path + "/far")).source, HasSubstr("the layout itself trains something else"));
  one_rank.layout.dtype = "bf16";
  const ChosenBounds coarse = chosen(run);
  EXPECT_THAT(coarse.source, HasSubstr("the coarser of both: the runs compute in fp32 and bf16"));
  EXPECT_EQ(coarse.steps[0].gradient, 0.1);
}

TEST(ParityRecords, DamagedFilesAreNamed) {
  const test::ScratchFolder folder;
  const std::string path = folder.path().string();
  const auto told = [&](const std::string& file) {
    return ThrowsMessage<IoError>(AllOf(HasSubstr(file + ": expected"), HasSubstr("found a damaged file"),
                                        HasSubstr("run ds-launch parity again, with an empty --folder")));
  };
  const std::string layout =
      R"({"data_ranks": 1, "micro_batch": 1, "accumulation": 1, "tensor_ranks": 1, "pipe_ranks": 1, "stage": 0)";
  folder.write(kParityLayoutFile, layout);
  EXPECT_THAT([&] { read_layout(path); }, told("layout.json"));
  folder.write(kParityLayoutFile, layout + "}");  // without the dtype
  EXPECT_THAT([&] { read_run(path); }, told("layout.json"));
  folder.write(kParityLayoutFile, layout + R"(, "dtype": "fp32"})");
  folder.write(parity_losses_file(0), R"({"step": 1, "losses": [1.5)");
  EXPECT_THAT([&] { read_run(path); }, told("losses_0.jsonl"));
  folder.write(
      parity_losses_file(0),
      R"({"step": 1, "losses": [1.5], "draws": false, "batches": 0, "loss": 1.5, "norm": null, "applied": true})");
  folder.write(parity_step_file(0, 0), std::string("\2\0\0\0\0\0\0\0{[", 10));
  const RecordedRun run = read_run(path);
  EXPECT_THAT([&] { run.tensors(0); }, told("step_0_of_0.safetensors"));
}

TEST(ParityJudge, AGradientThatNoHookReducesIsNamed) {
  expect_told([](Training& run) { scale(gradient(run, "norm.bias"), 0); },
              {"step 1: the gradient of norm.bias is 0 times", "leaves the parameter out"});
  // It is this rank's own, in another direction than the mean.
  expect_told([](Training& run) { gradient(run, "norm.bias") = wave(4.2, 0.1); },
              {"the gradient of norm.bias is another one", "reduction of this gradient is missing", "wrong ranks"});
}

TEST(ParityJudge, RatiosAreExplained) {
  const auto scaled = [](float by) {
    return [by](Training& run) {
      for (auto& item : run.tensors[1]) {
        if (item.first.starts_with("gradient/")) scale(item.second, by);
      }
    };
  };
  expect_told(scaled(2), {"(and of 2 more of 3)", "2 times (the data-parallel ranks)", "reduced twice"});
  expect_told(scaled(0.5F), {"(1 / the data-parallel ranks)", "divided by the ranks twice"});
  expect_told(scaled(1.0F / 3), {"(1 / gradient_accumulation_steps)", "gradient_accumulation_steps twice"});
  expect_told(scaled(3), {"(gradient_accumulation_steps)", "not divided by gradient_accumulation_steps"});
  expect_told([](Training& run) { scale(gradient(run, "last.weight"), 2); },
              {"the gradient of last.weight is 2 times", "a tied weight, parameters of experts"});
  expect_told([](Training& run) { scale(gradient(run, "last.weight"), 1.7F); },
              {"counted more than once: a tied weight that is reduced at each of its places"});
}

TEST(ParityJudge, LossesTellWhatTheDataHasDone) {
  expect_told(
      [](Training& run) {
        run.losses[0][1] = run.losses[0][0];
        run.mean[0] = 1.1;
      },
      {"step 1: the loss is 1.1 in place of 1.25", "all data-parallel ranks got the data of one rank"});
  expect_told([](Training& run) { run.mean[0] = 1.31; }, {"padding or empty tokens are counted in the mean"});
  expect_told(
      [](Training& run) {
        run.losses[0] = {{0.2, 3, 0.7}, {0.4, 0.6, 0.1}};
        run.mean[0] = 5.0 / 6;
      },
      {"the batches are not the same", "a generator that initialize() does not seed"});
  expect_told(
      [](Training& run) {
        run.losses[1] = {{1, 1.1, 1.25}, {1.3, 1.4, 1.7}};
        run.mean[1] = 1.29;
      },
      {"step 2: the loss is", "buffers that are not the same on all ranks", "dropout"});
}

TEST(ParityJudge, NormsUpdatesAndStartValuesAreTold) {
  expect_told([](Training& run) { run.norm[0] *= std::sqrt(2.0); },
              {"step 1: the gradient norm is", "the root of the data-parallel ranks", "without one axis"});
  expect_told(
      [](Training& run) {
        for (size_t i = 0; i < 40; ++i) {
          run.tensors[1]["weight/first.weight"][i] += 0.05F * gradient(run, "first.weight")[i];
        }
      },
      {"the gradients agree, and the update of first.weight is 0.5", "optimizer state or a step count that was not"});
  expect_told([](Training& run) { run.tensors[0]["weight/norm.bias"][3] += 1; },
              {"before the first step: norm.bias begins with other values"});
}

// The exit code of a program is not taken for a verdict: 1 is "different".
TEST(ParityCommand, ARunThatFailsIsTroubleWithItsExitCode) {
  const test::ScratchFolder folder;
  folder.write("config.json", "{}");
  Console console(1, 2);
  for (const int code : {1, 2, 139}) {
    const auto run = [&] {
      run_parity({folder.path().string() + "/config.json", "--", "./train"}, {}, console,
                 [&](const Options&, const std::vector<std::string>&) { return code; });
    };
    EXPECT_THAT(run, ThrowsMessage<UsageError>(
                         AllOf(HasSubstr(cat("expected the run of the layout to end with exit code 0, found ", code)),
                               HasSubstr("nothing is compared"))));
  }
}

TEST(ParityCommand, RefusesWhatItCannotRun) {
  Console console(1, 2);
  const auto run = [&](const std::vector<std::string>& words) {
    return run_parity(words, {}, console, [](const Options&, const std::vector<std::string>&) { return 0; });
  };
  const auto expect_refused = [&](const std::vector<std::string>& words, const std::string& what) {
    EXPECT_THAT([&] { run(words); }, ThrowsMessage<ConfigError>(HasSubstr(what)));
  };
  expect_refused({"config.json", "./train"}, "found no -- behind config.json");
  expect_refused({"--num_procs", "2", "--", "./train", "--data", "x"}, "the CONFIG is missing");
  expect_refused({"config.json", "--num_procs", "2", "--", "./train"},
                 "found --num_procs between config.json and --: flags of ds-launch go before CONFIG");
  expect_refused({"--replay", "--global_batches", "config.json", "--", "./train"},
                 "expected one of --replay and --global_batches, found both");
  EXPECT_THAT(
      [&] {
        run({"no_such.json", "--", "./train"});
      },
      ThrowsMessage<ConfigError>(HasSubstr("found no file no_such.json")));
  EXPECT_THAT(
      [&] {
        run({"--steps", "0", "config.json", "--", "./train"});
      },
      ThrowsMessage<ConfigError>(HasSubstr("--steps: expected a number of at least 1")));
  EXPECT_THAT(
      [&] {
        run({"--hostfile", "hosts", "config.json", "--", "./train"});
      },
      ThrowsMessage<ConfigError>(HasSubstr("ranks of this machine alone")));
}

}  // namespace
}  // namespace ds::launcher
