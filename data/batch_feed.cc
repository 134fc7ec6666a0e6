// The batches of a sampler, read ahead as a copy of the sampler predicts them.
#include <algorithm>
#include <deque>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "data/batch_sampler.h"
#include "data/feed_state.h"
#include "data/read_workers.h"
#include "dsengine/read_ahead.h"

namespace ds::data {
using engine::BatchSampler;
using engine::SamplerState;

struct BatchFeed::Parts {
  // A batch that the copy of the sampler gave.
  struct Ahead {
    SamplerState before;           // of the copy, when it was asked
    std::vector<int64_t> samples;  // empty: the epoch is over
    std::shared_ptr<ReadJob> job;  // null: the batch was given already, or there is none
    bool is_given() const { return !job && !samples.empty(); }
  };

  Parts(std::shared_ptr<BatchSampler> asked, Read reads, const FeedOptions& options)
      : sampler(std::move(asked)),
        read(std::move(reads)),
        rank(options.rank),
        ranks(options.world_size),
        workers(options) {}
  ~Parts() { forget(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  std::shared_ptr<ReadJob> begin(const SamplerState& at, const std::vector<int64_t>& samples);
  void forget();
  void predict();
  Value read_given(const SamplerState& before, const std::vector<int64_t>& samples);
  Value read_now();
  void pop_front();
  Value give_ahead();
  void pass_given();
  Value end_epoch();
  Value result_of(const ReadJob& job);
  // What a position with in_order = false is good for: the batches of one rank, in their size.
  nlohmann::json place() const { return {rank, ranks, sampler->batches_per_epoch()}; }

  std::shared_ptr<BatchSampler> sampler;
  Read read;
  int rank;
  int ranks;
  std::unique_ptr<BatchSampler> copy;  // stands behind the last of `ahead`; null: nothing is predicted
  std::deque<Ahead> ahead;             // the first one is not given
  std::vector<int64_t> loaded;         // batches, counted from the sampler's position, that were given before a resume
  std::vector<int64_t> indices;
  WaitedTime waited;
  Workers workers;  // last: its threads use the other members
};

std::shared_ptr<ReadJob> BatchFeed::Parts::begin(const SamplerState& at, const std::vector<int64_t>& samples) {
  auto job = std::make_shared<ReadJob>();
  job->seed = at.seed;
  job->epoch = at.epoch;
  job->indices = samples;
  const auto value = std::make_shared<Value>();
  job->parts.emplace_back([this, samples, value] { *value = read(samples); });
  job->finish = [value] { return std::move(*value); };
  workers.start(job);
  return job;
}

void BatchFeed::Parts::forget() {
  for (const Ahead& batch : ahead) {
    if (batch.job) batch.job->dropped = true;
  }
  ahead.clear();
  copy.reset();
}

// What the copy throws, the sampler will throw in its turn.
void BatchFeed::Parts::predict() {
  if (!copy) copy = sampler->copy();
  auto begun = static_cast<size_t>(
      std::count_if(ahead.begin(), ahead.end(), [](const Ahead& batch) { return !batch.is_given(); }));
  while (begun < workers.depth()) {
    if (!ahead.empty() && ahead.back().samples.empty() && !workers.reading().persistent_workers) break;
    Ahead next{.before = copy->state(), .samples = {}, .job = nullptr};
    try {
      next.samples = copy->next_batch();
    } catch (const std::exception&) {
      break;
    }
    const bool was_given = std::erase(loaded, static_cast<int64_t>(ahead.size())) > 0;
    if (!was_given && !next.samples.empty()) next.job = begin(next.before, next.samples);
    if (!was_given) ++begun;
    ahead.push_back(std::move(next));
  }
  pass_given();
}

BatchFeed::Value BatchFeed::Parts::result_of(const ReadJob& job) {
  indices = job.indices;
  if (job.error) std::rethrow_exception(job.error);
  return job.value;
}

// Reads a batch that the sampler, which stood at `before`, has given.
BatchFeed::Value BatchFeed::Parts::read_given(const SamplerState& before, const std::vector<int64_t>& samples) {
  if (samples.empty()) return end_epoch();
  const std::vector<std::shared_ptr<ReadJob>> jobs = {begin(before, samples)};
  try {
    workers.wait(jobs);
  } catch (...) {
    sampler->load_state(before);
    jobs.front()->dropped = true;
    throw;
  }
  return result_of(*jobs.front());
}

// Nothing is read ahead: the copy, if there is one, stays behind.
BatchFeed::Value BatchFeed::Parts::read_now() {
  copy.reset();
  const SamplerState before = sampler->state();
  return read_given(before, sampler->next_batch());
}

void BatchFeed::Parts::pop_front() {
  ahead.pop_front();
  for (int64_t& place : loaded) --place;
}

// Lets the sampler go past batches that were given.
void BatchFeed::Parts::pass_given() {
  while (!ahead.empty() && ahead.front().is_given()) {
    const bool came_true = sampler->next_batch() == ahead.front().samples;
    ensure(came_true, "a sampler whose batches come in any order gives those that its copy gave");
    pop_front();
  }
}

BatchFeed::Value BatchFeed::Parts::end_epoch() {
  if (workers.reading().persistent_workers) return nullptr;
  forget();
  workers.end();
  return nullptr;
}

// The sampler gives something else than its copy where the batch size was changed: what was read ahead is dropped.
BatchFeed::Value BatchFeed::Parts::give_ahead() {
  std::vector<std::shared_ptr<ReadJob>> jobs;
  std::vector<size_t> places;
  for (size_t place = 0; place < ahead.size() && !ahead[place].samples.empty(); ++place) {
    if (!ahead[place].job) continue;
    jobs.push_back(ahead[place].job);
    places.push_back(place);
    if (workers.reading().in_order) break;
  }
  const size_t chosen = jobs.empty() ? 0 : workers.wait(jobs);
  const std::shared_ptr<ReadJob> job = jobs.empty() ? nullptr : jobs[chosen];
  if (job && places[chosen] > 0) {
    ahead[places[chosen]].job = nullptr;
    return result_of(*job);
  }
  const SamplerState before = sampler->state();
  const std::vector<int64_t> samples = sampler->next_batch();
  if (samples != ahead.front().samples) {
    forget();
    return read_given(before, samples);
  }
  pop_front();
  if (!job) return end_epoch();
  pass_given();
  return result_of(*job);
}

BatchFeed::BatchFeed(std::shared_ptr<BatchSampler> sampler, Read read, const FeedOptions& options)
    : parts_(std::make_unique<Parts>(std::move(sampler), std::move(read), options)) {}

BatchFeed::~BatchFeed() = default;

BatchFeed::Value BatchFeed::next() {
  Parts& self = *parts_;
  self.workers.require_making_process();
  return self.waited.take([&]() -> Value {
    const bool has_workers = self.workers.reading().num_workers > 0;
    if (!has_workers && self.loaded.empty() && self.ahead.empty()) return self.read_now();
    if (!self.ahead.empty() && self.ahead.front().before != self.sampler->state()) {
      self.forget();
      self.loaded.clear();
    }
    self.predict();
    Value value = self.ahead.empty() ? self.read_now() : self.give_ahead();
    if (value && has_workers) self.predict();
    return value;
  });
}

const std::vector<int64_t>& BatchFeed::indices() const { return parts_->indices; }

int64_t BatchFeed::batches_per_epoch() const { return parts_->sampler->batches_per_epoch(); }

int64_t BatchFeed::epoch() const { return parts_->sampler->state().epoch; }

void BatchFeed::set_epoch(int64_t epoch) {
  parts_->sampler->set_epoch(epoch);
  parts_->loaded.clear();  // an epoch begins with its first batch
}

std::chrono::nanoseconds BatchFeed::waited() const { return parts_->waited.total(); }

int64_t BatchFeed::ahead() const {
  return std::count_if(parts_->ahead.begin(), parts_->ahead.end(),
                       [](const Parts::Ahead& batch) { return batch.job != nullptr; });
}

nlohmann::json BatchFeed::state_dict() const {
  const SamplerState& at = parts_->sampler->state();
  require(!at.curriculum, "data loader: a curriculum of samples has its position in the engine's checkpoints");
  std::vector<int64_t> given = parts_->loaded;
  for (size_t place = 0; place < parts_->ahead.size(); ++place) {
    if (parts_->ahead[place].is_given()) given.push_back(static_cast<int64_t>(place));
  }
  nlohmann::json state = {{"epoch", at.epoch}, {"next_sample", at.next_sample}, {"seed", at.seed}, {"ahead", given}};
  if (!parts_->workers.reading().in_order) state["of"] = parts_->place();
  return state;
}

void BatchFeed::load_state_dict(const nlohmann::json& state) {
  SamplerState at;
  at.epoch = number_of_state(state, "epoch");
  at.next_sample = number_of_state(state, "next_sample");
  at.seed = static_cast<uint64_t>(number_of_state(state, "seed"));
  std::vector<int64_t> given;
  for (const auto& place : state.value("ahead", nlohmann::json::array())) {
    require(place.is_number_integer() && place.get<int64_t>() >= 0,
            "data loader: expected numbers from 0 on in \"ahead\" of a position, found ", state.dump());
    given.push_back(place.get<int64_t>());
  }
  require(given.empty() || !parts_->workers.reading().in_order,
          "data loader: the position was saved with in_order = false, and some batches were given before earlier ones; "
          "resume with in_order = false");
  require(!state.contains("of") || state["of"] == parts_->place(),
          "data loader: expected a position of this rank with in_order = false, [rank, ranks, batches of an epoch] ",
          parts_->place().dump(), ", found one of ", state.value("of", nlohmann::json()).dump(),
          "; batches that are given in any order are each rank's own: let every rank save its position (rank_state of ",
          "checkpoints), and go on with the same ranks and batch size");
  parts_->sampler->load_state(at);
  parts_->forget();
  parts_->loaded = std::move(given);
}

}  // namespace ds::data
