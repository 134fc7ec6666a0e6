#include "comm/self_messages.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/collective.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::comm {

class SelfMessages::Receive : public WorkState {
 public:
  Receive(at::Tensor tensor, OperationName name) : tensor_(std::move(tensor)), name_(std::move(name)) {}

  void take(const at::Tensor& message) {
    require(message.numel() == tensor_.numel() && message.scalar_type() == tensor_.scalar_type(), name_, ": expected ",
            describe(tensor_), " from this rank itself, found ", describe(message));
    const at::NoGradGuard no_grad;
    tensor_.view(-1).copy_(message.view(-1));
    done_ = true;
  }
  bool is_completed() override { return done_; }
  void wait() override {
    require(done_, name_, ": waits for a message from this rank itself that was not sent; issue isend() before");
  }

 private:
  at::Tensor tensor_;
  OperationName name_;
  bool done_ = false;
};

Work SelfMessages::send(const at::Tensor& tensor, int tag) {
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

Work SelfMessages::recv(const at::Tensor& tensor, int tag, OperationName name) {
  const auto receive = std::make_shared<Receive>(tensor.detach(), std::move(name));
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
