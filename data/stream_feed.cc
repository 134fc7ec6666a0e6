// The batches of a stream, of which each worker reads a part.
#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "data/feed_state.h"
#include "data/read_workers.h"
#include "dsengine/read_ahead.h"

namespace ds::data {

struct StreamFeed::Parts {
  // What a worker reads: sample q of this rank, counted from `base`, is worker (q mod workers)'s.
  struct Reader {
    Next next;
    bool is_over = false;
  };
  // A batch that is read: slots[i] is its i-th sample, null from the end of the stream on.
  struct Begun {
    std::shared_ptr<ReadJob> job;
    std::shared_ptr<std::vector<Value>> slots;
  };

  Parts(Open opens, Collate collates, const Options& asked)
      : open(std::move(opens)), collate(std::move(collates)), options(asked), workers(asked.feed) {
    require(asked.batch_size > 0, "data loader: expected a batch size from 1 up, found ", asked.batch_size);
    require(asked.feed.reading.in_order,
            "data loader: the batches of a stream come in order, found in_order = false; leave it out");
  }
  ~Parts() { forget(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  int64_t readers_wanted() const { return std::max(1, options.feed.reading.num_workers); }
  int64_t ranks() const { return options.feed.world_size; }
  void open_readers();
  void begin();
  void read_part(size_t reader, int64_t begun_before, std::vector<Value>& slots);
  Value take();
  void read_ahead();
  void forget();

  Open open;
  Collate collate;
  Options options;
  int64_t epoch = 0;
  int64_t next_sample = 0;                       // behind the last batch that was given, counted over all ranks
  int64_t opened_at = 0;                         // next_sample when the readers were opened
  int64_t base = 0;                              // from there on the first sample of the stream that is this rank's
  int64_t begun = 0;                             // samples of this rank in batches that were begun
  bool is_over = false;                          // the last batch of the epoch was given
  std::vector<std::unique_ptr<Reader>> readers;  // empty: not opened
  std::deque<Begun> batches;
  WaitedTime waited;
  Workers workers;  // last: its threads use the other members
};

// The first sample from next_sample on that is this rank's.
void StreamFeed::Parts::open_readers() {
  const int64_t behind = (options.feed.rank - next_sample % ranks() + ranks()) % ranks();
  opened_at = next_sample;
  base = opened_at + behind;
  begun = 0;
  for (int64_t i = 0; i < readers_wanted(); ++i) readers.push_back(std::make_unique<Reader>());
}

void StreamFeed::Parts::read_part(size_t reader, int64_t begun_before, std::vector<Value>& slots) {
  Reader& own = *readers[reader];
  const int64_t stride = readers_wanted();
  if (!own.next && !own.is_over) {
    own.next = open({.epoch = epoch, .first = base + static_cast<int64_t>(reader) * ranks(), .step = ranks() * stride});
  }
  const int64_t skipped = (static_cast<int64_t>(reader) - begun_before % stride + stride) % stride;
  for (int64_t i = skipped; i < options.batch_size && !own.is_over; i += stride) {
    begin_sample(base + (begun_before + i) * ranks());
    slots[static_cast<size_t>(i)] = own.next();
    own.is_over = slots[static_cast<size_t>(i)] == nullptr;
  }
  begin_sample(-1);
}

void StreamFeed::Parts::begin() {
  if (readers.empty()) open_readers();
  auto job = std::make_shared<ReadJob>();
  job->seed = options.seed;
  job->epoch = epoch;
  const auto slots = std::make_shared<std::vector<Value>>(static_cast<size_t>(options.batch_size));
  for (size_t reader = 0; reader < readers.size(); ++reader) {
    job->parts.emplace_back([this, reader, slots, at = begun] { read_part(reader, at, *slots); });
  }
  job->finish = [this, slots]() -> Value {
    const auto end = std::find(slots->begin(), slots->end(), nullptr);
    require(std::all_of(end, slots->end(), [](const Value& sample) { return sample == nullptr; }),
            "a part of the stream ended before another one, which has a later sample; expected from open() the samples "
            "part.first, part.first + part.step, ... of one and the same stream, up to its end");
    if (end == slots->begin() || (options.drop_last && end != slots->end())) return nullptr;
    return collate(std::vector<Value>(slots->begin(), end));
  };
  for (int64_t i = 0; i < options.batch_size; ++i) job->indices.push_back(base + (begun + i) * ranks());
  try {
    workers.start(job);
  } catch (
      ...) {  // some readers stand in the middle of the batch: they begin anew behind the last batch that was given
    job->dropped = true;
    forget();
    throw;
  }
  begun += options.batch_size;
  batches.push_back({std::move(job), slots});
}

// Afterwards no worker reads.
void StreamFeed::Parts::forget() {
  for (const Begun& batch : batches) batch.job->dropped = true;
  batches.clear();
  if (options.feed.reading.persistent_workers) {
    workers.settle();
  } else {
    workers.end();
  }
  readers.clear();
  is_over = false;
}

void StreamFeed::Parts::read_ahead() {
  while (!is_over && batches.size() < workers.depth()) begin();
}

StreamFeed::Value StreamFeed::Parts::take() {
  read_ahead();
  if (!is_over) {
    workers.wait({batches.front().job});
    const Begun batch = std::move(batches.front());
    batches.pop_front();
    const bool is_whole = std::find(batch.slots->begin(), batch.slots->end(), nullptr) == batch.slots->end();
    next_sample = opened_at + (begun - static_cast<int64_t>(batches.size()) * options.batch_size) * ranks();
    if (batch.job->error) {
      forget();  // the part that failed did not come to the end of the batch: the next call opens all behind it
      std::rethrow_exception(batch.job->error);
    }
    is_over = !is_whole;
    if (options.feed.reading.num_workers > 0) read_ahead();
    if (batch.job->value) return batch.job->value;
  }
  forget();
  ++epoch;
  next_sample = 0;
  return nullptr;
}

StreamFeed::StreamFeed(Open open, Collate collate, const Options& options)
    : parts_(std::make_unique<Parts>(std::move(open), std::move(collate), options)) {}

StreamFeed::~StreamFeed() = default;

StreamFeed::Value StreamFeed::next() {
  parts_->workers.require_making_process();
  return parts_->waited.take([this] { return parts_->take(); });
}

int64_t StreamFeed::epoch() const { return parts_->epoch; }

void StreamFeed::set_epoch(int64_t epoch) {
  require(epoch >= 0, "data loader: expected an epoch from 0 up, found ", epoch);
  parts_->forget();
  parts_->epoch = epoch;
  parts_->next_sample = 0;
}

std::chrono::nanoseconds StreamFeed::waited() const { return parts_->waited.total(); }

nlohmann::json StreamFeed::state_dict() const {
  return {{"epoch", parts_->epoch}, {"next_sample", parts_->next_sample}, {"seed", parts_->options.seed}};
}

void StreamFeed::load_state_dict(const nlohmann::json& state) {
  const int64_t epoch = number_of_state(state, "epoch");
  const int64_t next_sample = number_of_state(state, "next_sample");
  const int64_t seed = number_of_state(state, "seed");
  parts_->forget();
  parts_->epoch = epoch;
  parts_->next_sample = next_sample;
  parts_->options.seed = static_cast<uint64_t>(seed);
}

}  // namespace ds::data
