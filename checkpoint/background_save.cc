#include "checkpoint/background_save.h"

#include <utility>

namespace ds::checkpoint {

void BackgroundSave::start(Parts parts) {
  struct Progress {
    std::function<void()> failed;
    std::exception_ptr failure;  // of an earlier part; used on the thread only
  };
  const auto progress = std::make_shared<Progress>(Progress{.failed = std::move(parts.failed), .failure = nullptr});
  // The function goes with its task, and with it what it holds (copies, files).
  const auto push = [&](std::function<void()> part) {
    return thread_.push([progress, part = std::move(part)] {
      if (progress->failure) std::rethrow_exception(progress->failure);
      try {
        if (part) part();
      } catch (...) {
        progress->failure = std::current_exception();
        if (progress->failed) progress->failed();
        throw;
      }
    });
  };
  begin_ = Clock::now();
  wanted_ = std::make_shared<std::atomic<bool>>(false);
  copy_ = push([copy = std::move(parts.copy), enough = *begin_ + spare_ / 2, wanted = wanted_] {
    if (copy) copy([&] { return *wanted || Clock::now() >= enough; });
  });
  write_ = push(std::move(parts.write));
  publish_ = push(std::move(parts.publish));
}

std::exception_ptr BackgroundSave::wait(const Task& task) noexcept {
  if (!task) return nullptr;
  try {
    task->wait();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void BackgroundSave::wait_copied() noexcept {
  if (begin_) spare_ = Clock::now() - *begin_;
  begin_.reset();
  if (!copy_) return;
  *wanted_ = true;
  wait(copy_);
}

std::exception_ptr BackgroundSave::wait_written() noexcept { return wait(write_); }

std::exception_ptr BackgroundSave::wait_published() noexcept {
  const std::exception_ptr failure = wait(publish_);
  copy_.reset();
  write_.reset();
  publish_.reset();
  return failure;
}

}  // namespace ds::checkpoint
