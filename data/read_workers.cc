#include "data/read_workers.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/listed.h"
#include "core/random_streams.h"
#include "core/without_stack.h"

namespace ds::data {
namespace {

constexpr size_t kMostNamed = 16;

// Ends the reading of a batch that nobody wants any more.
struct Dropped {};

// The batch and the sample that a thread is reading; a thread without one reads nothing.
struct Context {
  const ReadJob& job;
  std::atomic<int64_t>* sample;  // where others see the sample; null: nowhere
  WorkerInfo info;
  std::optional<at::Generator> generator = std::nullopt;  // of the sample
};
thread_local Context* reads = nullptr;

class ContextScope {
 public:
  explicit ContextScope(Context& context) : before_(std::exchange(reads, &context)) {}
  ~ContextScope() { reads = before_; }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  Context* before_;
};

std::string worker_text(const WorkerInfo& info) {
  return info.num_workers == 0 ? "no workers" : cat("worker ", info.id, " of ", info.num_workers);
}

// Throws the error that is being handled, with the sample that was read.
[[noreturn]] void throw_named(const Context& context, const std::string& reason) {
  const WorkerInfo& info = context.info;
  const std::string what = info.index >= 0 ? cat("sample ", info.index)
                                           : cat("the batch of samples ", listed(context.job.indices, kMostNamed));
  std::throw_with_nested(
      SampleError(cat("data loader: ", what, " of epoch ", info.epoch, " failed (", worker_text(info), ", rank ",
                      info.rank, " of ", info.world_size, "): ", reason)));
}

// Runs a part of a job; an error is thrown with the sample that it came from.
template <class Body>
void run_named(Context& context, const Body& body) {
  const ContextScope scope(context);
  try {
    body();
  } catch (const Dropped&) {
    return;
  } catch (const std::exception& error) {
    throw_named(context, without_stack(error.what()));
  } catch (...) {
    throw_named(context, "it threw something that is no std::exception");
  }
}

}  // namespace

std::optional<WorkerInfo> worker_info() { return reads ? std::optional(reads->info) : std::nullopt; }

at::Generator& sample_generator() {
  require(
      reads != nullptr && reads->info.index >= 0,
      "sample_generator: the calling thread reads no sample; call it in the get() of a dataset that a loader reads");
  if (!reads->generator) {
    reads->generator = generator_of(
        {.seed = reads->info.seed, .step = reads->info.epoch, .purpose = "sample", .coordinates = {reads->info.index}});
  }
  return *reads->generator;
}

void begin_sample(int64_t index) {
  if (!reads) return;
  if (reads->job.dropped) throw Dropped();
  reads->info.index = index;
  reads->generator.reset();
  if (reads->sample) *reads->sample = index;
}

std::string name_in_batch(size_t place) {
  if (!reads || place >= reads->job.indices.size()) return cat("sample ", place, " of the batch");
  return cat("sample ", reads->job.indices[place]);
}

Workers::Workers(const FeedOptions& options) : options_(options) {
  const ReadOptions& reading = options.reading;
  require(reading.num_workers >= 0, "data loader: expected num_workers from 0 up, found ", reading.num_workers);
  require(reading.prefetch_factor > 0, "data loader: expected prefetch_factor from 1 up, found ",
          reading.prefetch_factor, "; num_workers = 0 reads nothing ahead");
  require(reading.timeout.count() >= 0, "data loader: expected a timeout from 0 ms (none) up, found ",
          reading.timeout.count(), " ms");
  require(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size,
          "data loader: expected 0 <= rank < world_size, found rank ", options.rank, " of ", options.world_size);
  for (int i = 0; i < reading.num_workers; ++i) workers_.push_back(std::make_unique<Worker>());
}

size_t Workers::depth() const {
  return workers_.empty() ? 1 : workers_.size() * static_cast<size_t>(options_.reading.prefetch_factor);
}

void Workers::require_making_process() const {
  require(workers_.empty() || process_.is_this(),
          "data loader: this process is a child of fork(), which has none of the ", workers_.size(),
          " workers; make a loader in the child, or one with num_workers = 0 before the fork");
}

void Workers::start(const std::shared_ptr<ReadJob>& job) {
  job->parts_left = job->parts.size();
  job->computes_gradients = at::GradMode::is_enabled();
  for (size_t part = 0; part < job->parts.size(); ++part) {
    if (workers_.empty()) {
      run_part(*job, part, 0);
      continue;
    }
    size_t number = part;
    Worker& worker = job->parts.size() == 1 ? least_busy(&number) : *workers_[part];
    {
      const std::lock_guard lock(mutex_);
      ++worker.jobs;
    }
    try {
      if (!worker.thread) worker.thread = make_owned_where_made<TaskQueue>();
      worker.thread->push([this, job, part, number] { run_part(*job, part, number); });
    } catch (...) {  // there is no further thread
      const std::lock_guard lock(mutex_);
      --worker.jobs;
      throw;
    }
  }
}

Workers::Worker& Workers::least_busy(size_t* number) {
  const std::lock_guard lock(mutex_);
  size_t best = next_;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const size_t tried = (next_ + i) % workers_.size();
    if (workers_[tried]->jobs < workers_[best]->jobs) best = tried;
  }
  next_ = (best + 1) % workers_.size();
  *number = best;
  return *workers_[best];
}

void Workers::run_part(ReadJob& job, size_t part, size_t number) {
  Context context{.job = job,
                  .sample = workers_.empty() ? nullptr : &workers_[number]->sample,
                  .info = {.id = static_cast<int>(number),
                           .num_workers = options_.reading.num_workers,
                           .rank = options_.rank,
                           .world_size = options_.world_size,
                           .seed = job.seed,
                           .epoch = job.epoch}};
  std::exception_ptr error;
  const c10::AutoGradMode mode(job.computes_gradients);
  try {
    run_named(context, [&] {
      if (!workers_.empty() && !workers_[number]->is_initialised) {
        if (options_.reading.worker_init_fn) options_.reading.worker_init_fn(static_cast<int>(number));
        workers_[number]->is_initialised = true;
      }
      if (!job.dropped) job.parts[part]();
    });
  } catch (...) {
    error = std::current_exception();
  }
  job.parts[part] = nullptr;
  context.info.index = -1;
  bool is_last = false;
  {
    const std::lock_guard lock(mutex_);
    if (error && !job.error) job.error = std::exchange(error, nullptr);
    is_last = --job.parts_left == 0;
  }
  if (is_last && !job.error && !job.dropped) {
    try {
      run_named(context, [&] { job.value = job.finish(); });
    } catch (...) {
      error = std::current_exception();
    }
  }
  finish_part(job, number, is_last, std::move(error));
}

void Workers::finish_part(ReadJob& job, size_t number, bool is_last, std::exception_ptr error) {
  if (is_last) job.finish = nullptr;
  const std::lock_guard lock(mutex_);
  if (!workers_.empty()) {
    workers_[number]->sample = -1;
    --workers_[number]->jobs;
  }
  if (is_last) {
    if (error) job.error = std::move(error);
    job.is_done = true;
  }
  changed_.notify_all();
}

size_t Workers::wait(const std::vector<std::shared_ptr<ReadJob>>& jobs) {
  ensure(!jobs.empty(), "a job is waited for that was begun");
  size_t place = 0;
  const auto is_ready = [&] {
    for (place = 0; place < jobs.size(); ++place) {
      if (jobs[place]->is_done) return true;
    }
    return false;
  };
  std::unique_lock lock(mutex_);
  if (options_.reading.timeout.count() == 0) {
    changed_.wait(lock, is_ready);
  } else {
    const bool came = changed_.wait_for(lock, options_.reading.timeout, is_ready);
    if (!came) throw UsageError("data loader: " + late(*jobs.front()));
  }
  return place;
}

std::string Workers::late(const ReadJob& job) const {
  std::string text =
      cat("rank ", options_.rank, " of ", options_.world_size, " has waited ", options_.reading.timeout.count(),
          " ms (ReadOptions::timeout) for a batch of epoch ", job.epoch);
  if (!job.indices.empty()) text += cat(", samples ", listed(job.indices, kMostNamed));
  for (size_t i = 0; i < workers_.size(); ++i) {
    const int64_t sample = workers_[i]->sample;
    text += cat("; worker ", i, sample >= 0 ? cat(" reads sample ", sample) : std::string(" reads none"));
  }
  return text + "; use more workers or a longer timeout";
}

void Workers::settle() {
  if (!process_.is_this()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->jobs == 0; });
  });
}

void Workers::end() {
  for (const auto& worker : workers_) {
    worker->thread.reset();
    worker->is_initialised = false;
  }
}

}  // namespace ds::data
