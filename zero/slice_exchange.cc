#include "zero/slice_exchange.h"

#include <ATen/ops/empty.h>

namespace ds::zero {
namespace {

class CommunicatorExchange : public optimizers::SliceExchange {
 public:
  explicit CommunicatorExchange(comm::Communicator& communicator) : communicator_(communicator) {}
  int rank() const override { return communicator_.rank(); }
  int size() const override { return communicator_.size(); }
  void sum(const at::Tensor& values) override {
    communicator_.all_reduce(values, comm::ReduceOp::kSum, "optimizer norms").wait();
  }
  at::Tensor all_gather(const at::Tensor& slice) override {
    at::Tensor whole = at::empty({slice.numel() * communicator_.size()}, slice.options());
    communicator_.all_gather(whole, slice, "optimizer updates").wait();
    return whole;
  }

 private:
  comm::Communicator& communicator_;
};

class WholeExchange : public optimizers::SliceExchange {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void sum(const at::Tensor& /*values*/) override {}
  at::Tensor all_gather(const at::Tensor& slice) override { return slice; }
};

}  // namespace

std::shared_ptr<optimizers::SliceExchange> make_slice_exchange(comm::Communicator& communicator) {
  return std::make_shared<CommunicatorExchange>(communicator);
}

std::shared_ptr<optimizers::SliceExchange> make_whole_exchange() { return std::make_shared<WholeExchange>(); }

}  // namespace ds::zero
