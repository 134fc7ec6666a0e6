#include "model/agreement/shared_text.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstring>

#include "model/agreement/shared_failure.h"

namespace ds::engine {

std::string text_of_rank(const std::string& text, int root, c10::Device device, comm::Communicator& world) {
  if (world.size() == 1) return text;
  const at::Tensor length =
      at::scalar_tensor(static_cast<int64_t>(text.size()), at::TensorOptions().dtype(at::kLong)).view({1}).to(device);
  world.broadcast(length, root, "length of a text").wait();
  std::string result(static_cast<size_t>(length.item<int64_t>()), '\0');
  if (result.empty()) return result;
  at::Tensor bytes = at::empty({static_cast<int64_t>(result.size())}, at::kByte);
  if (world.rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(device);
  world.broadcast(bytes, root, "a text").wait();
  const at::Tensor received = bytes.to(at::kCPU);
  std::memcpy(result.data(), received.const_data_ptr(), result.size());
  return result;
}

std::string text_of_first_rank(const std::string& text, c10::Device device, comm::Communicator& world) {
  return text_of_rank(text, 0, device, world);
}

bool same_text_on_all_ranks(const std::string& text, c10::Device device, comm::Communicator& world) {
  const bool differs = text_of_first_rank(text, device, world) != text;
  return largest_of_ranks(differs ? 1 : 0, device, world, "a text that differs") == 0;
}

}  // namespace ds::engine
