#include "core/task_queue.h"

#include <utility>

namespace ds {

bool TaskQueue::Task::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void TaskQueue::Task::wait() const {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

void TaskQueue::Task::run() {
  std::exception_ptr error;
  try {
    body_();
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr;  // frees what the task holds before anyone hears that it is done
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  finished_.notify_all();
}

TaskQueue::~TaskQueue() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<TaskQueue::Task> TaskQueue::push(std::function<void()> body) {
  auto task = std::make_shared<Task>(std::move(body));
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  waiting_.push_back(task);
  changed_.notify_one();
  return task;
}

void TaskQueue::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    auto task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    task->run();
    task.reset();
    lock.lock();
  }
}

}  // namespace ds
