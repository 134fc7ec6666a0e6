// A thread that runs tasks one after another.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace ds {

// The thread starts with the first task. The destructor waits for the tasks under way. push() may be called from any
// thread.
class TaskQueue {
 public:
  class Task {
   public:
    explicit Task(std::function<void()> body) : body_(std::move(body)) {}
    bool done() const;
    // Returns when the task has run; throws what it threw. Any number of threads and times.
    void wait() const;

   private:
    friend class TaskQueue;
    void run();

    std::function<void()> body_;
    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    bool done_ = false;
    std::exception_ptr error_;
  };

  TaskQueue() = default;
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  std::shared_ptr<Task> push(std::function<void()> body);

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ds
