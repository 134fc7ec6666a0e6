// One operation made of exchanges that follow one another.
#pragma once

#include <deque>
#include <functional>

#include "comm/collective.h"
#include "dsengine/comm.h"

namespace ds::compression {

// `first` is under way. When it has ended, the first step runs and begins the next exchange; the last step finishes the
// operation and returns a finished Work. Steps run in wait(), those before the last one in is_ready() too, on the
// thread that calls, without gradient recording. A step that throws runs again in the next call.
class ChainedWork final : public comm::WorkState {
 public:
  using Step = std::function<comm::Work()>;

  ChainedWork(comm::Work first, std::deque<Step> steps) : work_(std::move(first)), steps_(std::move(steps)) {}
  bool is_completed() override { return steps_.empty(); }
  bool is_ready() override;
  void wait() override;

 private:
  void advance();

  comm::Work work_;
  std::deque<Step> steps_;
};

comm::Work chained(comm::Work first, std::deque<ChainedWork::Step> steps);

}  // namespace ds::compression
