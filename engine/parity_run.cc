#include "engine/parity_run.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "comm/meeting/environment_reader.h"
#include "config/config_source.h"
#include "core/check.h"
#include "core/number_text.h"
#include "core/parity/parity_names.h"
#include "core/text.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

std::string variable(const char* name) { return comm::process_environment(name).value_or(std::string()); }

ParityRun::Order order_of(const std::string& text) {
  using Order = ParityRun::Order;
  if (text.empty()) return Order::kOwn;
  require<ConfigError>(text == kParityOrderBatches || text == kParityOrderSamples, kParityOrderVariable, ": expected ",
                       kParityOrderBatches, " or ", kParityOrderSamples, ", found \"", text, "\"");
  return text == kParityOrderBatches ? Order::kOtherBatches : Order::kOtherSamples;
}

// Throws for keys whose effect the run on one rank does not have.
void require_repeatable(const ordered_json& config, const std::string& file, bool takes_global_batches) {
  const auto refuse = [&](const char* key, const char* why) {
    throw ConfigError(cat("parity: ", file, ": ", key, ": ", why, "; remove the key for the comparison"));
  };
  const auto is_on = [&](const char* key) { return config.contains(key) && config[key] == true; };
  if (is_on("sync_batchnorm") && !takes_global_batches) {
    refuse("sync_batchnorm",
           "statistics are of the batches of all ranks, which one rank takes one after the other, unless "
           "--global_batches lets it take them as one");
  }
  if (config.contains("gradient_allreduce_op") && config["gradient_allreduce_op"] != "mean") {
    refuse("gradient_allreduce_op", "a sum over ranks is no mean over the micro-batches of one rank");
  }
  if (config.contains("gradient_compression")) {
    refuse("gradient_compression", "gradients that are sent with loss are others by design");
  }
  if (config.contains("managed_gradient_accumulation") && config["managed_gradient_accumulation"] == false) {
    refuse("managed_gradient_accumulation", "the program ends its steps itself, and one rank needs longer ones");
  }
  if (config.contains("elasticity")) refuse("elasticity", "the batch of one rank is not that of many");
}

// Some of the batches that the samplers of all ranks give in a step, in an order of its own; several of them may be
// one.
class StepSampler : public BatchSampler {
 public:
  struct Order {
    std::vector<size_t> wanted;  // places of batches in a step, where those of the ranks come in turn
    size_t joined = 1;           // as many of `wanted`, one after the other, are one batch
    bool reversed = false;       // the samples of each batch come the other way round
  };
  StepSampler(std::vector<std::shared_ptr<BatchSampler>> samplers, int64_t accumulation, Order order)
      : samplers_(std::move(samplers)), accumulation_(accumulation), order_(std::move(order)) {}

  std::unique_ptr<BatchSampler> copy() const override {
    auto result = std::make_unique<StepSampler>(*this);
    for (std::shared_ptr<BatchSampler>& sampler : result->samplers_) sampler = sampler->copy();
    return result;
  }
  std::vector<int64_t> next_batch() override {
    if (coming_.empty()) take_step();
    if (coming_.empty()) {  // the epoch is over for all of them
      is_over_ = false;
      return {};
    }
    std::vector<int64_t> batch = std::move(coming_.front());
    coming_.pop_front();
    if (order_.reversed) std::reverse(batch.begin(), batch.end());
    return batch;
  }
  int64_t dataset_size() const override { return samplers_.front()->dataset_size(); }
  int64_t batches_per_epoch() const override {
    const auto in_a_step = static_cast<int64_t>(order_.wanted.size() / order_.joined);
    return samplers_.front()->batches_per_epoch() * in_a_step / accumulation_;
  }
  bool has_equal_batches() const override { return samplers_.front()->has_equal_batches(); }
  void set_epoch(int64_t epoch) override {
    forget();
    for (const auto& sampler : samplers_) sampler->set_epoch(epoch);
  }
  void set_batch_size(int64_t batch_size) override {
    for (const auto& sampler : samplers_) sampler->set_batch_size(batch_size);
  }
  void set_accumulation(int64_t) override {}
  const SamplerState& state() const override { return samplers_.front()->state(); }
  void load_state(const SamplerState& state) override {
    forget();
    for (const auto& sampler : samplers_) sampler->load_state(state);
  }

 private:
  void forget() {
    coming_.clear();
    is_over_ = false;
  }
  // Takes the batches of a step, or those that the epoch still has.
  void take_step() {
    std::vector<std::vector<int64_t>> step;
    for (int64_t i = 0; i < accumulation_ && !is_over_; ++i) {
      for (const auto& sampler : samplers_) {
        std::vector<int64_t> batch = sampler->next_batch();
        is_over_ = batch.empty();
        if (!is_over_) step.push_back(std::move(batch));
      }
    }
    for (size_t i = 0; i < order_.wanted.size(); ++i) {
      const size_t place = order_.wanted[i];
      if (place >= step.size()) continue;
      if (i % order_.joined == 0) coming_.emplace_back();
      coming_.back().insert(coming_.back().end(), step[place].begin(), step[place].end());
    }
  }

  std::vector<std::shared_ptr<BatchSampler>> samplers_;
  int64_t accumulation_;
  Order order_;
  std::deque<std::vector<int64_t>> coming_;
  bool is_over_ = false;  // the epoch of the samplers is over, what is coming has to be given first
};

}  // namespace

std::optional<ParityRun> ParityRun::from_environment() {
  ParityRun run{.folder = variable(kParityFolderVariable),
                .source = {},
                .like = variable(kParityLikeVariable),
                .order = order_of(variable(kParityOrderVariable)),
                .keeps_batches = !variable(kParityBatchesVariable).empty(),
                .takes_global_batches = !variable(kParityGlobalBatchesVariable).empty(),
                .ends_process = true};
  if (run.folder.empty()) return std::nullopt;
  const std::string file = variable(kParityConfigVariable);
  const std::string steps = variable(kParityStepsVariable);
  run.steps = parse_whole_number(steps).value_or(0);
  require<ConfigError>(run.steps > 0, kParityStepsVariable,
                       ": expected the number of steps to record, at least 1, found \"", steps, "\"");
  require<ConfigError>(!file.empty(), kParityConfigVariable, ": expected the path of a ds_config, found none");
  require<ConfigError>(run.order == Order::kOwn || !run.like.empty(), kParityOrderVariable, ": expected the folder of ",
                       "the first run in ", kParityLikeVariable, ", found none");
  run.source = config::ConfigSource(std::filesystem::path(file));
  return run;
}

config::ConfigSource ParityRun::config() const {
  ordered_json config = config::ConfigReader::read(source).root;
  require<ConfigError>(config.is_object(), source.name(), ": expected a JSON object");
  require_repeatable(config, source.name(), takes_global_batches);
  if (!is_reference()) return source;
  const RecordedLayout layout = read_layout(like);
  config.erase("train_batch_size");
  config["train_micro_batch_size_per_gpu"] = layout.micro_batch * (takes_global_batches ? layout.data_ranks : 1);
  config["gradient_accumulation_steps"] = layout.accumulation * (takes_global_batches ? 1 : layout.data_ranks);
  config["zero_optimization"] = {{"stage", 0}};
  config.erase("tensor_parallel");
  if (config.contains("pipeline") && config["pipeline"].is_object()) {
    for (const char* const key : {"stages", "schedule", "chunks", "partition"}) config["pipeline"].erase(key);
  }
  return config;
}

std::shared_ptr<BatchSampler> ParityRun::sampler(const config::DsConfig& config, const SamplerPlace& place,
                                                 int64_t dataset_size, const EpochOrder& epochs) const {
  // A curriculum goes on with the engine's steps, and is asked for more than batches.
  if (like.empty() || config.data_efficiency.chooses_samples())
    return make_sampler(config, place, dataset_size, epochs);
  const RecordedLayout layout = read_layout(like);
  config::DsConfig of_layout = config;
  of_layout.train_micro_batch_size_per_gpu = layout.micro_batch;
  std::vector<std::shared_ptr<BatchSampler>> samplers;
  SamplerPlace of_rank = place;
  of_rank.world_size = static_cast<int>(layout.data_ranks);
  for (of_rank.rank = 0; of_rank.rank < of_rank.world_size; ++of_rank.rank) {
    samplers.push_back(make_sampler(of_layout, of_rank, dataset_size, epochs));
  }
  StepSampler::Order taken{.wanted = {}, .reversed = order == Order::kOtherSamples};
  if (is_reference() && takes_global_batches) taken.joined = static_cast<size_t>(layout.data_ranks);
  const int64_t batches = is_reference() ? layout.accumulation * layout.data_ranks : layout.accumulation;
  for (int64_t i = 0; i < batches; ++i) {
    taken.wanted.push_back(static_cast<size_t>(is_reference() ? i : place_in_step(layout, order, place.rank, i)));
  }
  return std::make_shared<StepSampler>(std::move(samplers), layout.accumulation, std::move(taken));
}

int64_t place_in_step(const RecordedLayout& layout, ParityRun::Order order, int64_t data_rank, int64_t micro_batch) {
  const int64_t other_rank = layout.data_ranks - 1 - data_rank;
  const bool is_own = order == ParityRun::Order::kOwn;
  if (!is_own && layout.accumulation == 1) return other_rank;
  if (is_own || micro_batch == 0) return micro_batch * layout.data_ranks + data_rank;
  return (layout.accumulation - micro_batch) * layout.data_ranks + other_rank;
}

}  // namespace ds::engine
