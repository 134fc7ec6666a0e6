// Features of the engine by pairs: a small model trains two steps under both on ranks that are threads, and is compared
// with a plain loop, or the engine refuses the pair. docs/status.md has the outcome of each: a cell that says something
// else than the run fails. scripts/feature_pairs writes the page's section anew from a run of all pairs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/fully_shard.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/file_text.h"
#include "tests/support/grid.h"
#include "tests/support/own_optimizers.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using pipeline::tokens_of;

constexpr int kDepth = 2;
constexpr int kMicroBatches = 2;
constexpr int kLosses = 3;  // before the first step, between the two, and after them
constexpr int kDataRanks = 2;
constexpr double kRate = 0.02;
constexpr double kOwnRate = 0.5;  // the length of a step of the program's own rule

enum class Kind { kStage, kOptimizer, kWrapper, kOther };

struct Feature {
  std::string name;
  ordered_json config;  // merged into the ds_config
  double bound = 5e-6;  // of a loss' difference from the plain loop's
  Kind kind = Kind::kOther;
};

std::vector<Feature> all_features() {
  const ordered_json on = {{"enabled", true}};
  const auto stage = [](int number) { return ordered_json{{"zero_optimization", {{"stage", number}}}}; };
  const ordered_json offload = {
      {"zero_optimization", {{"stage", 2}, {"offload_optimizer", {{"device", "cpu"}, {"pin_memory", false}}}}}};
  const ordered_json half = {{"enabled", true}, {"initial_scale_power", 8}};
  const ordered_json quantized = {
      {"shared_parameters", {{"enabled", true}, {"schedule_offset", 0}}},
      {"different_groups",
       {{"g",
         {{"params", {{"start_bits", 8}, {"target_bits", 8}, {"quantization_period", 1}}}, {"modules", {"wide"}}}}}}};
  return {{"ZeRO 1", stage(1), 5e-6, Kind::kStage},
          {"ZeRO 2", stage(2), 5e-6, Kind::kStage},
          {"ZeRO 3", stage(3), 5e-6, Kind::kStage},
          {"offload", offload},
          {"bf16", {{"bf16", on}}, 0.05},
          {"fp16", {{"fp16", half}}, 0.05},
          {"torch_autocast", {{"torch_autocast", {{"enabled", true}, {"dtype", "bfloat16"}}}}, 0.05},
          {"FP8", {{"fp8", {{"enabled", true}, {"emulate", true}}}}, 0.1},
          {"compression_training", {{"compression_training", {{"weight_quantization", quantized}}}}, 0.05},
          {"int8 gradients", {{"gradient_compression", {{"method", "int8"}}}}, 0.05},
          {"pipeline", {{"pipeline", {{"stages", 2}}}}},
          {"tensor axis", {{"tensor_parallel", {{"autotp_size", 2}}}}},
          {"recomputation", {{"pipeline", {{"activation_checkpoint_interval", 1}}}}},
          {"torch optimizer", ordered_json::object(), 5e-6, Kind::kOptimizer},
          {"own rule", ordered_json::object(), 5e-6, Kind::kOptimizer},
          {"DDP", ordered_json::object(), 5e-6, Kind::kWrapper},
          {"fully_shard", ordered_json::object(), 5e-6, Kind::kWrapper}};
}

// The layers of pipeline::layers_of() as one module.
struct WholeNetImpl : torch::nn::Module {
  WholeNetImpl() {
    embed = register_module("embed", pipeline::TokenEmbedding("embed"));
    for (int i = 0; i < kDepth; ++i) {
      mixers.push_back(register_module("h" + std::to_string(i), pipeline::Mixer("h." + std::to_string(i))));
    }
    head = register_module("head", pipeline::Head("head"));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed(tokens);
    for (pipeline::Mixer& mixer : mixers) {
      const auto layer = [of = mixer.ptr()](const at::Tensor& y) { return of->forward(y); };
      x = recomputed ? recompute::checkpoint(layer, x) : layer(x);
    }
    return head(x);
  }
  bool recomputed = false;
  pipeline::TokenEmbedding embed{nullptr};
  std::vector<pipeline::Mixer> mixers;
  pipeline::Head head{nullptr};
};
TORCH_MODULE(WholeNet);

at::Tensor loss_of(WholeNet& net, const pipeline::MicroBatch& batch) {
  return pipeline::cross_entropy(net->forward(batch.inputs[0]).to(at::kFloat), batch.labels[0]);
}

// A rule of the program's that looks at the whole gradient of a parameter.
class UnitSteps : public OwnOptimizer {
  using OwnOptimizer::OwnOptimizer;
  void update(at::Tensor& parameter, double lr) override {
    parameter.sub_(parameter.grad() / (parameter.grad().norm() + 1e-6), lr);
  }
};

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<at::Tensor>& parameters, bool own_rule) {
  if (own_rule) return std::make_shared<UnitSteps>(parameters, OwnOptions(kOwnRate));
  return std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(kRate).weight_decay(0.01));
}

std::vector<double> plain_losses(bool own_rule) {
  WholeNet net;
  const auto optimizer = make_optimizer(net->parameters(), own_rule);
  std::vector<double> losses;
  for (int step = 0; step < kLosses; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int i = 0; i < kMicroBatches * kDataRanks; ++i) {
      const at::Tensor loss =
          loss_of(net, tokens_of(step * kMicroBatches + i / kDataRanks, i % kDataRanks)) / (kMicroBatches * kDataRanks);
      loss.backward();
      sum += loss.item<double>();
    }
    losses.push_back(sum);
    optimizer->step();
  }
  return losses;
}

// Two features at once, or one of them alone.
class Pair {
 public:
  Pair(const Feature& a, const Feature& b) : names_{a.name, b.name}, bound_(std::max(a.bound, b.bound)) {
    config_ = {{"train_micro_batch_size_per_gpu", 2},
               {"gradient_accumulation_steps", kMicroBatches},
               {"log_level", "error"},
               {"zero_optimization", {{"stage", 0}}}};
    if (!has("torch optimizer") && !has("own rule")) {
      config_["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", kRate}, {"weight_decay", 0.01}}}};
    }
    config_.merge_patch(b.config);  // a stage comes before "offload", which brings one of its own
    config_.merge_patch(a.config);
    if (has("ZeRO 3")) config_["zero_optimization"]["stage3_param_persistence_threshold"] = 20;
    if (has("ZeRO 3") && has("offload")) {
      config_["zero_optimization"]["offload_param"] = {{"device", "cpu"}, {"pin_memory", false}};
    }
    if (!has("pipeline")) config_.erase("pipeline");
    if (has("fp16") && has("torch_autocast")) config_["torch_autocast"]["dtype"] = "float16";  // one 16-bit dtype
  }

  // "works", "refused: " with what the engine says, or what has gone wrong.
  std::string outcome() const {
    std::vector<double> losses;
    std::string refusal;
    std::mutex mutex;
    try {
      test::run_ranks(kDataRanks * (has("pipeline") ? 2 : 1) * (has("tensor axis") ? 2 : 1),
                      [&](comm::Communicator& world) {
                        torch::set_num_threads(1);
                        std::string text;
                        const std::vector<double> found = train(world, text);
                        const std::lock_guard lock(mutex);
                        if (world.rank() != 0) return;
                        losses = found;
                        refusal = text;
                      });
    } catch (const std::exception& error) {
      return std::string("fails: ") + error.what();
    }
    if (!refusal.empty()) return "refused: " + refusal;
    return compared(losses);
  }

 private:
  bool has(const std::string& name) const { return names_.first == name || names_.second == name; }

  std::string compared(const std::vector<double>& losses) const {
    const std::vector<double> wanted = plain_losses(has("own rule"));
    EXPECT_GT(std::abs(wanted.front() - wanted.back()), 0.2) << "the steps are seen in the loss";
    if (losses.size() != wanted.size()) return "fails: no losses";
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!(std::abs(losses[i] - wanted[i]) <= bound_)) {
        return "fails: loss " + std::to_string(i) + " is " + std::to_string(losses[i]) + ", expected " +
               std::to_string(wanted[i]);
      }
    }
    return "works";
  }

  // What the program hands over; `refusal` gets what is thrown before training.
  std::vector<double> train(comm::Communicator& world, std::string& refusal) const {
    WholeNet net;
    net->recomputed = has("recomputation");
    std::shared_ptr<torch::nn::Module> model = net.ptr();
    if (has("pipeline")) {
      model = std::make_shared<pipeline::PipelineModule>(pipeline::layers_of(kDepth, false),
                                                         pipeline::PipelineOptions{.loss = pipeline::cross_entropy});
    }
    std::shared_ptr<void> wrapper;
    std::shared_ptr<void> other;
    std::shared_ptr<Engine> engine;
    try {
      if (has("DDP")) {
        wrapper = std::make_shared<DistributedDataParallel<std::shared_ptr<torch::nn::Module>>>(
            model, DistributedDataParallelOptions{.process_group = test::borrowed(world)});
      }
      if (has("fully_shard")) other = fully_shard(model, {.process_group = test::borrowed(world)});
      engine = initialize(options(model, world)).engine;
    } catch (const std::exception& error) {
      refusal = error.what();
      return {};
    }
    std::vector<double> losses;
    for (int64_t step = 0; step < kLosses; ++step) losses.push_back(step_of(*engine, net, step));
    return losses;
  }

  InitializeOptions options(const std::shared_ptr<torch::nn::Module>& model, comm::Communicator& world) const {
    InitializeOptions result;
    result.model = model;
    result.config = config_;
    result.communicator = test::borrowed(world);
    if (has("tensor axis")) {
      result.split = {{".*wide", parallel::Style::kColumn}, {".*narrow", parallel::Style::kRow}};
    }
    if (has("torch optimizer") || has("own rule")) {
      result.make_optimizer = [own_rule = has("own rule")](torch::nn::Module& of) {
        return make_optimizer(of.parameters(), own_rule);
      };
      if (!has("pipeline")) {
        result.optimizer = result.make_optimizer(*model);
        result.make_optimizer = nullptr;
      }
    }
    return result;
  }

  double step_of(Engine& engine, WholeNet& net, int64_t step) const {
    int64_t next = step * kMicroBatches;
    const int rank = engine.communicator().rank();
    if (has("pipeline")) return engine.train_batch([&] { return tokens_of(next++, rank); }).item<double>();
    double sum = 0;
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      const at::Tensor loss = loss_of(net, tokens_of(next++, rank));
      sum += loss.item<double>() / kMicroBatches;
      engine.backward(loss);
      engine.step();
    }
    at::Tensor mean = at::full({1}, sum / kDataRanks, at::kDouble);
    engine.communicator().all_reduce(mean).wait();
    return mean.item<double>();
  }

  std::pair<std::string, std::string> names_;
  double bound_;
  ordered_json config_;
};

// The section of the page: a cell for each pair, a feature alone in the diagonal, and the sentences of refusals below.
class PairTable {
 public:
  static constexpr const char* kHeading = "## Pairs of features\n";

  explicit PairTable(std::vector<Feature> features) : features_(std::move(features)) {}

  size_t size() const { return features_.size(); }
  const Feature& feature(size_t i) const { return features_[i]; }
  // Two values of one setting are no pair.
  bool is_pair(size_t i, size_t j) const {
    const Kind kind = features_[i].kind;
    return i == j || kind != features_[j].kind || kind == Kind::kOther || kind == Kind::kWrapper;
  }

  void read(const std::string& page) {
    std::map<std::string, std::string> notes;
    std::istringstream lines(section_of(page));
    std::vector<std::vector<std::string>> rows;
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("| ")) rows.push_back(cells_of(line));
      const size_t dot = line.find(". ");
      if (dot != std::string::npos && std::isdigit(static_cast<unsigned char>(line[0])) != 0) {
        notes[line.substr(0, dot)] = line.substr(dot + 2);
      }
    }
    for (size_t r = 1; r < rows.size(); ++r) {
      for (size_t c = 1; c < rows[r].size() && c < rows[0].size(); ++c) {
        std::string cell = rows[r][c];
        constexpr size_t kRefused = 8;  // "refused "
        if (cell.starts_with("refused ")) cell = "refused: " + notes[cell.substr(kRefused)];
        cells_[{rows[r][0], rows[0][c]}] = cell;
      }
    }
  }

  std::string cell(size_t i, size_t j) const {
    const auto found = cells_.find({features_[i].name, features_[j].name});
    return found == cells_.end() ? "" : found->second;
  }
  void set(size_t i, size_t j, const std::string& outcome) {
    cells_[{features_[i].name, features_[j].name}] = outcome;
    cells_[{features_[j].name, features_[i].name}] = outcome;
  }

  std::string text() const {
    std::vector<std::string> sentences;
    std::string table = "| |";
    for (const Feature& feature : features_) table += " " + feature.name + " |";
    table += "\n|---|";
    for (size_t i = 0; i < size(); ++i) table += "---|";
    for (size_t i = 0; i < size(); ++i) {
      table += "\n| " + features_[i].name + " |";
      for (size_t j = 0; j < size(); ++j) table += " " + shown(cell(i, j), sentences) + " |";
    }
    std::string result =
        std::string(kHeading) +
        "\nWritten by `scripts/feature_pairs`, which runs each pair (`tests/engine/feature_pairs_test.cc`). "
        "A small model trains two steps on\nranks that are threads, two of them data-parallel. "
        "Losses are within 5e-6 of a plain loop, and within 0.05 where a feature rounds, 0.1 on FP8. The\n"
        "diagonal has a feature alone. `own rule` is an optimizer of the program that looks at whole "
        "gradients. `DDP` and `fully_shard` are\nwrappers whose module is handed to an engine; with "
        "loops of their own they have pages ([fully_shard](fully_shard.md)). A number is that of\nthe "
        "refusal below, as the engine begins it.\n\n" +
        table + "\n\n";
    for (size_t i = 0; i < sentences.size(); ++i) result += std::to_string(i + 1) + ". " + sentences[i] + "\n";
    return result + "\n";
  }

  static std::string section_of(const std::string& page) {
    const size_t begin = page.find(kHeading);
    if (begin == std::string::npos) return "";
    return page.substr(begin, page.find("\n## ", begin) + 1 - begin);
  }

 private:
  static std::vector<std::string> cells_of(const std::string& line) {
    std::vector<std::string> cells;
    for (size_t begin = 1, end = 0; (end = line.find('|', begin)) != std::string::npos; begin = end + 1) {
      const std::string cell = line.substr(begin, end - begin);
      const size_t first = cell.find_first_not_of(' ');
      cells.push_back(first == std::string::npos ? "" : cell.substr(first, cell.find_last_not_of(' ') + 1 - first));
    }
    return cells;
  }

  static std::string shown(const std::string& outcome, std::vector<std::string>& sentences) {
    constexpr const char* kRefused = "refused: ";
    if (!outcome.starts_with(kRefused)) return outcome;
    const std::string sentence = outcome.substr(std::string(kRefused).size());
    const auto known = std::find(sentences.begin(), sentences.end(), sentence);
    const auto number = std::distance(sentences.begin(), known) + 1;
    if (known == sentences.end()) sentences.push_back(sentence);
    return "refused " + std::to_string(number);
  }

  const std::vector<Feature> features_;
  std::map<std::pair<std::string, std::string>, std::string> cells_;
};

// The beginning of a refusal on one line, without what would end a cell or a code span.
std::string shortened(std::string outcome) {
  constexpr size_t kMost = 170;
  std::string line;
  for (const char c : outcome) {
    if (c == '\n' || c == ' ') {
      if (!line.empty() && line.back() != ' ') line += ' ';
    } else {
      line += c == '|' ? '/' : c;
    }
  }
  if (line.size() > kMost) line = line.substr(0, line.rfind(' ', kMost)) + " ...";
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

const std::string& page_path() {
  static const std::string path = std::string(DS_SOURCE_DIR) + "/docs/status.md";
  return path;
}

TEST(FeaturePairs, AreWhatThePageSays) {
  PairTable table(all_features());
  const std::string page = test::file_text(page_path());
  table.read(page);
  const bool writes = std::getenv("DS_WRITE_FEATURE_PAIRS") != nullptr;
  // Also what no pair of the sample shows: other rows, cells that are no pairs, sentences that nobody refers to.
  if (!writes) EXPECT_EQ(PairTable::section_of(page), table.text()) << "docs/status.md: run scripts/feature_pairs";
  // A row of the table and a distance from the diagonal: each feature is in the sample with some others.
  for (const test::GridCell& cell : test::wanted_cells({table.size(), table.size()}, writes ? 2 : 1)) {
    const size_t i = std::min(cell[0], (cell[0] + cell[1]) % table.size());
    const size_t j = std::max(cell[0], (cell[0] + cell[1]) % table.size());
    if (!table.is_pair(i, j)) {
      if (writes) table.set(i, j, "");
      continue;
    }
    const std::string outcome = shortened(Pair(table.feature(i), table.feature(j)).outcome());
    const std::string names = table.feature(i).name + " with " + table.feature(j).name;
    EXPECT_FALSE(outcome.starts_with("fails")) << names << ": " << outcome;
    if (writes) {
      table.set(i, j, outcome);
    } else {
      EXPECT_EQ(table.cell(i, j), outcome) << names << ", docs/status.md: run scripts/feature_pairs";
      EXPECT_EQ(table.cell(j, i), outcome) << names << ", docs/status.md: run scripts/feature_pairs";
    }
  }
  if (!writes) return;
  std::string changed = page;
  const std::string before = PairTable::section_of(page);
  const size_t place = before.empty() ? page.find("## Loops without an engine") : page.find(before);
  ASSERT_NE(place, std::string::npos);
  changed.replace(place, before.size(), table.text());
  std::ofstream(page_path()) << changed;
}

}  // namespace
}  // namespace ds::engine
