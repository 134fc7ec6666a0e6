// Threads that read batches, and what such a thread knows of the sample that it reads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/making_process.h"
#include "core/task_queue.h"
#include "dsengine/read_ahead.h"

namespace ds::data {

// A batch that is to be read, from parts that may be read at once. Workers::start() begins it; from then on the workers
// own what they write until Workers::wait() has named the job.
struct ReadJob {
  uint64_t seed = 0;
  int64_t epoch = 0;
  std::vector<int64_t> indices;  // the samples, where they are known beforehand
  // A single part is read by the worker that has the least to do, several ones part p by worker p.
  std::vector<std::function<void()>> parts;
  std::function<std::shared_ptr<void>()> finish;  // makes the batch, on the thread that read the last part

  std::shared_ptr<void> value;
  std::exception_ptr error;           // the error of the first part that failed, or of finish()
  std::atomic<bool> dropped = false;  // true: nobody wants it any more
  size_t parts_left = 0;
  bool is_done = false;
  bool computes_gradients = true;  // the mode of the thread that began it
};

// The name of a sample of the batch that the calling thread reads, in a message: "sample 17", or "sample 2 of the
// batch" where it reads none.
std::string name_in_batch(size_t place);

// The workers of a loader. One thread calls it.
class Workers {
 public:
  // Throws UsageError for options out of range. Threads begin with their first job.
  explicit Workers(const FeedOptions& options);
  // Returns when the samples that are being read are read. Jobs that were not dropped are read first.
  ~Workers() = default;
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Begins a job. Without workers it is done when this returns.
  void start(const std::shared_ptr<ReadJob>& job);
  // Waits until one of the jobs is read and returns its place. Throws UsageError after ReadOptions::timeout.
  size_t wait(const std::vector<std::shared_ptr<ReadJob>>& jobs);
  // Returns when no worker has anything to do.
  void settle();
  // Ends the threads; the next job begins new ones. Every job has been dropped or waited for.
  void end();
  // Throws UsageError in a child of fork(), which has no workers.
  void require_making_process() const;

  const ReadOptions& reading() const { return options_.reading; }
  // The most jobs that are begun before they are taken.
  size_t depth() const;

 private:
  struct Worker {
    std::atomic<int64_t> sample = -1;  // the sample that it reads; -1: none
    size_t jobs = 0;                   // jobs that it has begun or will begin; of mutex_
    bool is_initialised = false;       // of its thread
    OwnedWhereMade<TaskQueue> thread;
  };

  Worker& least_busy(size_t* number);
  void run_part(ReadJob& job, size_t part, size_t number);
  void finish_part(ReadJob& job, size_t number, bool is_last, std::exception_ptr error);
  std::string late(const ReadJob& job) const;

  FeedOptions options_;
  MakingProcess process_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a part of a job is done
  size_t next_ = 0;                  // the worker to try first
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace ds::data
