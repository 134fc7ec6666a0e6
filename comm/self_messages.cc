#include "comm/self_messages.h"

#include <ATen/core/grad_mode.h>

#include "comm/collective.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::comm {

class SelfMessages::Receive : public WorkState {
 public:
  Receive(at::Tensor tensor, std::string what) : tensor_(std::move(tensor)), what_(std::move(what)) {}

  void take(const at::Tensor& message) {
    require(message.numel() == tensor_.numel() && message.scalar_type() == tensor_.scalar_type(), what_, ": expected ",
            describe(tensor_), " from this rank itself, found ", describe(message));
    const at::NoGradGuard no_grad;
    tensor_.view(-1).copy_(message.view(-1));
    done_ = true;
  }
  bool is_completed() override { return done_; }
  void wait() override {
    require(done_, what_, ": waits for a message from this rank itself that was not sent; issue isend() before");
  }

 private:
  at::Tensor tensor_;
  std::string what_;
  bool done_ = false;
};

Work SelfMessages::send(const at::Tensor& tensor, int tag, const std::string& what) {
  Box& box = boxes_[tag];
  if (box.expected.empty()) {
    box.sent.push_back(tensor.detach().clone());
  } else {
    const auto receive = box.expected.front();
    box.expected.pop_front();
    receive->take(tensor.detach());
  }
  return {};
}

Work SelfMessages::recv(const at::Tensor& tensor, int tag, const std::string& what) {
  const auto receive = std::make_shared<Receive>(tensor.detach(), what);
  Box& box = boxes_[tag];
  if (box.sent.empty()) {
    box.expected.push_back(receive);
  } else {
    const at::Tensor message = box.sent.front();
    box.sent.pop_front();
    receive->take(message);
  }
  return Work(receive);
}

}  // namespace ds::comm
