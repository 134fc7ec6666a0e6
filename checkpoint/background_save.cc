#include "checkpoint/background_save.h"

#include <utility>

namespace ds::checkpoint {

void BackgroundSave::start(Parts parts) {
  struct Progress {
    Parts parts;
    std::exception_ptr failure;  // of an earlier part; used on the thread only
  };
  const auto progress = std::make_shared<Progress>();
  progress->parts = std::move(parts);
  const auto step = [progress](std::function<void()> Parts::*part) {
    return [progress, part] {
      if (progress->failure) std::rethrow_exception(progress->failure);
      try {
        if (progress->parts.*part) (progress->parts.*part)();
      } catch (...) {
        progress->failure = std::current_exception();
        if (progress->parts.failed) progress->parts.failed();
        throw;
      }
    };
  };
  copy_ = thread_.push(step(&Parts::copy));
  write_ = thread_.push(step(&Parts::write));
  publish_ = thread_.push([run = step(&Parts::publish), progress] {
    // What the parts hold (copies, files) goes with the last of them.
    struct Release {
      std::shared_ptr<Progress> progress;
      ~Release() { progress->parts = {}; }
    } release{progress};
    run();
  });
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
  if (copy_) wait(copy_);
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
