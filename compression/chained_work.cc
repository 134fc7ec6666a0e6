#include "compression/chained_work.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <memory>
#include <utility>

namespace ds::compression {

void ChainedWork::advance() {
  work_.wait();
  work_ = {};
  comm::Work next = steps_.front()();
  steps_.pop_front();
  work_ = std::move(next);
}

bool ChainedWork::is_ready() {
  const at::NoGradGuard no_grad;
  try {
    while (!steps_.empty() && work_.is_ready()) {
      if (steps_.size() == 1) return true;
      advance();
    }
  } catch (const std::exception&) {
    return true;  // wait() throws it
  }
  return steps_.empty();
}

void ChainedWork::wait() {
  const at::NoGradGuard no_grad;
  while (!steps_.empty()) advance();
}

comm::Work chained(comm::Work first, std::deque<ChainedWork::Step> steps) {
  return comm::Work(std::make_shared<ChainedWork>(std::move(first), std::move(steps)));
}

}  // namespace ds::compression
