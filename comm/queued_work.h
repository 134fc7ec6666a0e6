// A collective that runs as a task of a queue.
#pragma once

#include <memory>
#include <utility>

#include "comm/collective.h"
#include "core/task_queue.h"
#include "dsengine/comm.h"

namespace ds::comm {

class QueuedWork final : public WorkState {
 public:
  explicit QueuedWork(std::shared_ptr<TaskQueue::Task> task) : task_(std::move(task)) {}
  bool is_completed() override { return task_->done(); }
  void wait() override { task_->wait(); }

 private:
  std::shared_ptr<TaskQueue::Task> task_;
};

}  // namespace ds::comm
