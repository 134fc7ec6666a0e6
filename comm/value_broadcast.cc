#include "comm/value_broadcast.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <map>
#include <tuple>
#include <utility>

#include "core/text.h"

namespace ds::comm {
namespace {

constexpr size_t kSharedBytes = size_t{4} << 20U;  // of a message that several tensors share

// Of tensors of one device and dtype, in their order.
class SharedMessages {
 public:
  SharedMessages(int root, Communicator& ranks, std::string label)
      : root_(root), ranks_(ranks), label_(std::move(label)) {}

  void add(const at::Tensor& tensor) {
    const size_t bytes = tensor.nbytes();
    if (bytes_ + bytes > kSharedBytes) send();
    small_.push_back(tensor);
    bytes_ += bytes;
    if (bytes_ >= kSharedBytes) send();
  }

  void send() {
    if (small_.size() == 1) {
      send_alone(small_.front());
    } else if (!small_.empty()) {
      send_together();
    }
    small_.clear();
    bytes_ = 0;
  }

 private:
  void send_alone(const at::Tensor& tensor) {
    const at::Tensor values = tensor.contiguous();
    ranks_.broadcast(values, root_, label_).wait();
    if (values.data_ptr() != tensor.data_ptr()) tensor.copy_(values);
  }

  void send_together() {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : small_) flat.push_back(tensor.reshape({-1}));
    const at::Tensor all = at::cat(flat);
    ranks_.broadcast(all, root_, label_).wait();
    if (ranks_.rank() == root_) return;
    int64_t begin = 0;
    for (const at::Tensor& tensor : small_) {
      tensor.copy_(all.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  }

  int root_;
  Communicator& ranks_;
  std::string label_;
  std::vector<at::Tensor> small_;
  size_t bytes_ = 0;
};

}  // namespace

void broadcast_values(const std::vector<at::Tensor>& tensors, int root, Communicator& ranks, const std::string& what) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_grad;
  // The host's first, on all ranks.
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Kind, std::vector<at::Tensor>> by_kind;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const at::Device device = tensor.device();
    by_kind[{device.type(), device.index(), tensor.scalar_type()}].push_back(tensor.variable_data());
  }
  for (const auto& [kind, values] : by_kind) {
    SharedMessages messages(root, ranks, cat(what, " of ", c10::toString(std::get<2>(kind))));
    for (const at::Tensor& one : values) messages.add(one);
    messages.send();
  }
}

}  // namespace ds::comm
