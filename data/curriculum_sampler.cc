#include "data/curriculum_sampler.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/random_streams.h"
#include "data/permutation.h"

namespace ds::engine {
namespace {

using efficiency::CurriculumPosition;
using efficiency::MetricFiles;
using efficiency::SampleMetric;

constexpr const char* kSection = "data_efficiency.data_sampling";

std::shared_ptr<const std::vector<MetricFiles>> files_of(const CurriculumOptions& options) {
  require(options.dataset_size > 0, "sampler: expected a dataset with at least one sample, found ",
          options.dataset_size);
  const auto result = std::make_shared<std::vector<MetricFiles>>();
  for (const SampleMetric& metric : options.metrics) {
    if (!metric.chooses) continue;
    result->emplace_back(metric, options.dataset_size);
    const int64_t absent = options.dataset_size - result->back().size();
    if (absent == 0 || !options.tells) continue;
    log::warning(kSection, ": metric ", metric.name, " knows ", result->back().size(), " of the ", options.dataset_size,
                 " samples of the training data; ", absent, " are never drawn");
  }
  return result;
}

// A number in [0, bound), of 64 random bits: numbers differ in their probabilities by 2^-64.
int64_t below(int64_t bound, uint64_t bits) { return static_cast<int64_t>(bits % static_cast<uint64_t>(bound)); }

// The next samples of one cluster, whose order is drawn anew each time it is used up.
class ClusterOrder {
 public:
  ClusterOrder(uint64_t seed, size_t cluster, int64_t size)
      : key_(key_of({.seed = seed, .purpose = "order of a cluster", .coordinates = {static_cast<int64_t>(cluster)}})),
        size_(size) {}
  // Place number `drawn` of all rounds, one round behind the other.
  int64_t place(int64_t drawn) {
    const int64_t round = drawn / size_;
    if (round != round_) order_.emplace(key_, static_cast<uint64_t>(round), size_);
    round_ = round;
    return (*order_)(drawn % size_);
  }

 private:
  uint64_t key_;
  int64_t size_;
  int64_t round_ = -1;
  std::optional<Permutation> order_;
};

}  // namespace

CurriculumSampler::CurriculumSampler(const CurriculumOptions& options)
    : options_(options), files_(files_of(options)), clusters_(options.dataset_size, files_) {
  require(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size,
          "sampler: expected 0 <= rank < world_size, found rank ", options.rank, " of ", options.world_size);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  require<ConfigError>(options.num_epochs > 0 && options.num_epochs <= kMost / options.dataset_size, kSection,
                       ".num_epochs: expected a number > 0, whose product with the ", options.dataset_size,
                       " samples of the training data is below 2^62, found ", options.num_epochs);
  set_batch_size(options.batch_size);
  set_accumulation(options.accumulation);
  require(!options.drop_last || batches_per_epoch() > 0, "sampler: drop_last with ", samples_of_epoch(),
          " samples leaves no batch of ", options.batch_size, " x ", options.world_size, " ranks; use a smaller batch ",
          "or set dataloader_drop_last to false");
  state_.seed = options.seed;
  state_.curriculum.emplace();
  for (const MetricFiles& files : clusters_.metrics()) {
    state_.curriculum->files = state_.curriculum->files * 31 + files.digest();
  }
}

std::vector<int64_t> CurriculumSampler::next_batch() {
  const int64_t left = samples_of_epoch() - state_.next_sample;
  if (left <= 0 || (options_.drop_last && left < dealt_at_once())) {
    state_.next_sample = 0;
    ++state_.epoch;
    return {};
  }
  CurriculumPosition& position = *state_.curriculum;
  const auto rest = [&] { return static_cast<int64_t>(batch_.size()) - position.taken; };
  if (options_.drop_last && !batch_.empty() && rest() < dealt_at_once()) end_global_batch();
  if (batch_.empty()) {
    grow(position.batches + 1);
    position.batch_size = dealt_at_once() * options_.accumulation;
    draw();
  }
  shown_step_ = position.batches + 1;
  const int64_t taken = std::min(dealt_at_once(), rest());
  const int64_t own = (taken + options_.world_size - 1) / options_.world_size;
  std::vector<int64_t> indices(static_cast<size_t>(own));
  for (int64_t i = 0; i < own; ++i) {
    const int64_t place = position.taken + options_.rank * own + i;
    indices[static_cast<size_t>(i)] = batch_[static_cast<size_t>(place) % batch_.size()];
  }
  position.taken += taken;
  state_.next_sample += taken;
  if (rest() == 0) end_global_batch();
  return indices;
}

void CurriculumSampler::end_global_batch() {
  CurriculumPosition& position = *state_.curriculum;
  for (size_t c = 0; c < drawn_.size(); ++c) position.clusters[c].drawn = drawn_[c];
  batch_.clear();
  position.batch_size = 0;
  position.taken = 0;
  ++position.batches;
}

std::vector<int64_t> CurriculumSampler::difficulties_of(int64_t step) const {
  std::vector<int64_t> result;
  for (const SampleMetric& metric : options_.metrics) {
    if (metric.chooses) result.push_back(metric.schedule.at(step));
  }
  return result;
}

void CurriculumSampler::grow(int64_t step) {
  std::vector<int64_t> wanted = difficulties_of(step);
  if (clusters_.count() > 0 && wanted == difficulties_) return;
  std::string text;
  for (size_t m = 0; m < wanted.size(); ++m) {
    const MetricFiles& files = clusters_.metrics()[m];
    require<ConfigError>(difficulties_.empty() || wanted[m] >= difficulties_[m], kSection, ": metric ", files.name(),
                         ": expected a difficulty that does not fall, for samples that are admitted stay so, found ",
                         wanted[m], " at step ", step, " after ", difficulties_.empty() ? 0 : difficulties_[m]);
    text += cat(m == 0 ? "" : ", ", files.name(), ' ', wanted[m]);
  }
  const bool grown = clusters_.grow(wanted);
  difficulties_ = std::move(wanted);
  if (grown) state_.curriculum->clusters.push_back({.difficulties = difficulties_, .drawn = 0});
  if (clusters_.count() == 0) {
    std::string easiest;
    for (const MetricFiles& files : clusters_.metrics()) {
      easiest += cat(easiest.empty() ? "" : ", ", files.name(), ' ', files.least());
    }
    throw ConfigError(cat(kSection, ": no sample is admitted at step ", step, ": ", text, "; the easiest ones have ",
                          easiest, ". Raise min_difficulty"));
  }
  if (!options_.tells || clusters_.metrics().empty()) return;
  log::debug(kSection, ": step ", step, ": ", text, ": ", clusters_.admitted(), " samples admitted",
             grown ? "" : ", none of them new");
}

void CurriculumSampler::draw() {
  const CurriculumPosition& position = *state_.curriculum;
  const int64_t step = position.batches + 1;
  std::vector<int64_t> ends;  // of clusters, among all that are admitted
  for (size_t c = 0; c < clusters_.count(); ++c) ends.push_back((c == 0 ? 0 : ends.back()) + clusters_.size(c));
  std::vector<int64_t> wanted(clusters_.count());
  for (int64_t i = 0; i < position.batch_size; ++i) {
    const uint64_t bits =
        key_of({.seed = state_.seed, .step = step, .micro_batch = i, .purpose = "cluster of a sample"});
    const auto end = std::upper_bound(ends.begin(), ends.end(), below(ends.back(), bits));
    ++wanted[static_cast<size_t>(end - ends.begin())];
  }
  std::vector<int64_t> samples;
  drawn_.clear();
  for (size_t c = 0; c < clusters_.count(); ++c) {
    const int64_t before = position.clusters[c].drawn;
    drawn_.push_back(before + wanted[c]);
    if (wanted[c] == 0) continue;
    ClusterOrder order(state_.seed, c, clusters_.size(c));
    for (int64_t i = 0; i < wanted[c]; ++i) samples.push_back(clusters_.sample(c, order.place(before + i)));
  }
  const Permutation shuffled(key_of({.seed = state_.seed, .step = step, .purpose = "order of a global batch"}), 0,
                             position.batch_size);
  batch_.resize(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    batch_[i] = samples[static_cast<size_t>(shuffled(static_cast<int64_t>(i)))];
  }
}

std::unique_ptr<BatchSampler> CurriculumSampler::copy() const {
  auto result = std::make_unique<CurriculumSampler>(*this);
  result->options_.tells = false;
  return result;
}

int64_t CurriculumSampler::batches_per_epoch() const {
  const int64_t rounded = options_.drop_last ? 0 : dealt_at_once() - 1;
  return (samples_of_epoch() + rounded) / dealt_at_once();
}

void CurriculumSampler::set_epoch(int64_t epoch) {
  require(epoch == state_.epoch && state_.next_sample == 0, "set_epoch: a curriculum of samples goes on from batch to ",
          "batch and cannot jump: expected epoch ", state_.epoch, " at its beginning, found ", epoch, " at sample ",
          state_.next_sample, " of epoch ", state_.epoch, ". Load a checkpoint to go back");
}

void CurriculumSampler::set_batch_size(int64_t batch_size) {
  require(batch_size > 0, "sampler: expected a positive batch size, found ", batch_size);
  options_.batch_size = batch_size;
}

void CurriculumSampler::set_accumulation(int64_t batches) {
  require(batches > 0, "sampler: expected a positive number of micro-batches in a global batch, found ", batches);
  options_.accumulation = batches;
}

void CurriculumSampler::load_state(const SamplerState& state) {
  require(state.curriculum.has_value(), "sampler: cannot begin a curriculum of samples where the data of a run ",
          "without one was left");
  const CurriculumPosition& position = *state.curriculum;
  require(position.files == state_.curriculum->files, "sampler: the metric files are not those that the curriculum ",
          "was saved with");
  require(state.epoch >= 0 && state.next_sample >= 0 && position.batches >= 0 && position.taken >= 0 &&
              (position.taken < position.batch_size || (position.taken == 0 && position.batch_size == 0)) &&
              position.batch_size <= std::numeric_limits<int32_t>::max(),
          "sampler: cannot go on behind ", position.taken, " of ", position.batch_size, " samples of global batch ",
          position.batches + 1, ", sample ", state.next_sample, " of epoch ", state.epoch);
  efficiency::SampleClusters clusters(options_.dataset_size, files_);
  std::vector<int64_t> difficulties;
  for (const CurriculumPosition::Cluster& cluster : position.clusters) {
    bool follows = cluster.difficulties.size() == clusters.metrics().size() && cluster.drawn >= 0;
    for (size_t m = 0; follows && m < difficulties.size(); ++m) follows = cluster.difficulties[m] >= difficulties[m];
    require(follows && clusters.grow(cluster.difficulties), "sampler: cluster ", clusters.count() + 1, " of ",
            position.clusters.size(), " is not one of these metrics; resume with those of the run that was saved");
    difficulties = cluster.difficulties;
  }
  require(position.batch_size == 0 || clusters.count() > 0, "sampler: a global batch without samples");
  clusters_ = std::move(clusters);
  difficulties_ = std::move(difficulties);
  state_ = state;
  batch_.clear();
  drawn_.clear();
  if (position.batch_size > 0) draw();
  shown_step_ = position.batches + 1;
}

int64_t CurriculumSampler::difficulty(const std::string& metric) const {
  return options_.metrics[index_of(metric)].schedule.at(shown_step_);
}

void CurriculumSampler::set_custom_schedule(const std::string& metric, std::function<int64_t(int64_t step)> schedule) {
  SampleMetric& of = options_.metrics[index_of(metric)];
  require(of.schedule.kind == efficiency::DifficultySchedule::Kind::kCustom, "set_custom_schedule: metric ", metric,
          ": expected schedule_type \"custom\", found another type");
  of.schedule.custom = std::move(schedule);
}

size_t CurriculumSampler::index_of(const std::string& name) const {
  std::string names;
  for (size_t i = 0; i < options_.metrics.size(); ++i) {
    if (options_.metrics[i].name == name) return i;
    names += cat(names.empty() ? "" : ", ", options_.metrics[i].name);
  }
  throw UsageError(cat("data sampler: expected a metric of ", kSection, " (", names, "), found ", name));
}

}  // namespace ds::engine
