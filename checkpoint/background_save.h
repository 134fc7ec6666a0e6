// The three parts of a save on a thread of their own: copy (or write) what is live, write the copies, publish.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "core/task_queue.h"

namespace ds::checkpoint {

// One save at a time. Methods from one thread.
class BackgroundSave {
 public:
  // Any part may be empty. When one throws, the later ones do not run, and `failed` is called on the thread.
  struct Parts {
    // hurry() returns whether somebody waits for it or soon may, so that it had better be quick. So it is once half of
    // the time is over that passed between the last save's start and the first wait_copied(), and always at the first
    // save.
    std::function<void(const std::function<bool()>& hurry)> copy;
    std::function<void()> write;
    std::function<void()> publish;
    std::function<void()> failed;
  };

  void start(Parts parts);
  bool runs() const { return publish_ && !publish_->done(); }
  // Returns when `copy` is over: what it read may change. At once when no save runs.
  void wait_copied() noexcept;
  // Each returns what this part or an earlier one of the last save threw, null when it went well. wait_published()
  // returns it once.
  std::exception_ptr wait_written() noexcept;
  std::exception_ptr wait_published() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  using Task = std::shared_ptr<TaskQueue::Task>;
  static std::exception_ptr wait(const Task& task) noexcept;

  Task copy_, write_, publish_;
  std::optional<Clock::time_point> begin_;  // when the last save started; empty after its first wait_copied()
  Clock::duration spare_{};  // how long the last save had until its first wait_copied(); 0 before the first save
  std::shared_ptr<std::atomic<bool>> wanted_;
  TaskQueue thread_;  // last: ends before what it uses
};

}  // namespace ds::checkpoint
