#include "comm/agreement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "comm/meeting/host_identity.h"
#include "core/text.h"
#include "core/without_stack.h"

namespace ds::comm {
namespace {

constexpr size_t kSharedBytes = size_t{4} << 20U;  // the size of a message that several tensors share

// Sends tensors of one device and dtype, in their order.
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

std::vector<int64_t> numbers_of_ranks(Communicator& ranks, c10::Device device, const std::vector<int64_t>& own,
                                      const std::string& label) {
  const at::Tensor input = at::tensor(own, at::kLong).to(device);
  const at::Tensor output = at::empty({input.numel() * ranks.size()}, input.options());
  ranks.all_gather(output, input, label).wait();
  const at::Tensor all = output.to(at::kCPU);
  const auto* const first = all.const_data_ptr<int64_t>();
  return {first, first + all.numel()};
}

std::vector<int> hosts_of(Communicator& ranks, c10::Device device) {
  const auto own = static_cast<int64_t>(std::hash<std::string>()(shared_memory_domain()));
  std::map<int64_t, int> numbers;
  std::vector<int> hosts;
  for (const int64_t host : numbers_of_ranks(ranks, device, {own}, "hosts of ranks")) {
    hosts.push_back(numbers.try_emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

double mean_of_ranks(double value, c10::Device device, Communicator& ranks, const char* label) {
  const std::vector<int64_t> bits = numbers_of_ranks(ranks, device, {std::bit_cast<int64_t>(value)}, label);
  if (std::all_of(bits.begin(), bits.end(), [&](int64_t other) { return other == bits.front(); })) return value;
  double sum = 0;
  for (const int64_t of_rank : bits) sum += std::bit_cast<double>(of_rank);
  return sum / static_cast<double>(bits.size());
}

int failed_rank(const std::exception_ptr& failure, c10::Device device, Communicator& ranks) {
  const int64_t failed = largest_of_ranks(failure ? ranks.rank() : -1, device, ranks, "failure of a rank");
  if (failure) std::rethrow_exception(failure);
  return static_cast<int>(failed);
}

int64_t largest_of_ranks(int64_t value, c10::Device device, Communicator& ranks, const char* label) {
  if (ranks.size() == 1) return value;
  const at::Tensor largest = at::scalar_tensor(value, at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  ranks.all_reduce(largest, ReduceOp::kMax, label).wait();
  return largest.item<int64_t>();
}

bool same_number_on_all_ranks(int64_t value, c10::Device device, Communicator& ranks, const char* label) {
  const int64_t largest = largest_of_ranks(value, device, ranks, label);
  return -largest_of_ranks(-value, device, ranks, label) == largest;
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return without_stack(error.what());
  } catch (...) {
    return "an exception of unknown type";
  }
}

std::optional<RankFailure> failure_of_ranks(const std::exception_ptr& failure, c10::Device device,
                                            Communicator& ranks) {
  const int64_t failed = largest_of_ranks(failure ? ranks.rank() : -1, device, ranks, "failure of a rank");
  if (failed < 0) return std::nullopt;
  const auto rank = static_cast<int>(failed);
  std::string message = text_of_rank(failure ? message_of(failure) : std::string(), rank, device, ranks);
  if (failure) std::rethrow_exception(failure);
  return RankFailure{.rank = rank, .message = std::move(message)};
}

std::string text_of_rank(const std::string& text, int root, c10::Device device, Communicator& ranks) {
  if (ranks.size() == 1) return text;
  const at::Tensor length =
      at::scalar_tensor(static_cast<int64_t>(text.size()), at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  ranks.broadcast(length, root, "length of a text").wait();
  std::string result(static_cast<size_t>(length.item<int64_t>()), '\0');
  if (result.empty()) return result;
  at::Tensor bytes = at::empty({static_cast<int64_t>(result.size())}, at::kByte);
  if (ranks.rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(device);
  ranks.broadcast(bytes, root, "a text").wait();
  const at::Tensor received = bytes.to(at::kCPU);
  std::memcpy(result.data(), received.const_data_ptr(), result.size());
  return result;
}

std::string text_of_first_rank(const std::string& text, c10::Device device, Communicator& ranks) {
  return text_of_rank(text, 0, device, ranks);
}

std::vector<std::string> texts_of_ranks(const std::string& text, c10::Device device, Communicator& ranks,
                                        const char* label) {
  if (ranks.size() == 1) return {text};
  const int64_t length = largest_of_ranks(static_cast<int64_t>(text.size()), device, ranks, label);
  std::vector<std::string> texts(static_cast<size_t>(ranks.size()));
  if (length == 0) return texts;
  at::Tensor own = at::zeros({length}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), text.data(), text.size());
  own = own.to(device);
  at::Tensor all = at::empty({length * ranks.size()}, own.options());
  ranks.all_gather(all, own, label).wait();
  all = all.to(at::kCPU);
  const auto* begin = static_cast<const char*>(all.const_data_ptr());
  for (std::string& of_rank : texts) {
    of_rank.assign(begin, strnlen(begin, static_cast<size_t>(length)));
    begin += length;
  }
  return texts;
}

bool same_text_on_all_ranks(const std::string& text, c10::Device device, Communicator& ranks) {
  const bool differs = text_of_first_rank(text, device, ranks) != text;
  return largest_of_ranks(differs ? 1 : 0, device, ranks, "a text that differs") == 0;
}

void broadcast_values(const std::vector<at::Tensor>& tensors, int root, Communicator& ranks, const std::string& what) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_grad;
  // Sorted, so that all ranks begin with the host's tensors.
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
