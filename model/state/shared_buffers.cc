#include "model/state/shared_buffers.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "comm/agreement.h"
#include "core/listed.h"
#include "core/text.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

std::vector<at::Tensor> buffers_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (auto& [name, buffer] : named_buffers_of(module)) result.push_back(std::move(buffer));
  return result;
}

bool is_statistic(const std::string& name) {
  const std::string last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var" || last == "num_batches_tracked";
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> named_buffers_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (buffer.defined() && buffer.numel() > 0 && seen.insert(buffer.unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), buffer);
    }
  }
  return result;
}

void broadcast_buffers(const torch::nn::Module& module, comm::Communicator& ranks) {
  comm::broadcast_values(buffers_of(module), /*root=*/0, ranks, "buffers");
}

uint64_t digest_of_buffers(const torch::nn::Module& module) {
  uint64_t digest = 0;
  for (const at::Tensor& buffer : buffers_of(module)) digest = digest * 0x9E3779B97F4A7C15 + zero::digest_of(buffer);
  return digest;
}

std::vector<std::string> buffers_that_differ(const torch::nn::Module& module, comm::Communicator& ranks,
                                             c10::Device device) {
  const auto buffers = named_buffers_of(module);
  const auto count = static_cast<int64_t>(buffers.size());
  const auto counts = comm::numbers_of_ranks(ranks, device, {count}, "number of buffers");
  if (count == 0 || std::any_of(counts.begin(), counts.end(), [&](int64_t other) { return other != count; })) return {};
  std::vector<int64_t> own;
  for (const auto& [name, buffer] : buffers) {
    const bool has_values = !buffer.is_meta() && buffer.layout() == at::kStrided;
    own.push_back(has_values ? static_cast<int64_t>(zero::digest_of(buffer)) : 0);
  }
  const std::vector<int64_t> all = comm::numbers_of_ranks(ranks, device, own, "digests of buffers");
  std::vector<std::string> names;
  for (size_t i = 0; i < buffers.size(); ++i) {
    for (size_t of_rank = i; of_rank < all.size(); of_rank += buffers.size()) {
      if (all[of_rank] == all[i]) continue;
      names.push_back(buffers[i].first);
      break;
    }
  }
  return names;
}

std::string advice_on_buffers(const std::vector<std::string>& names) {
  std::vector<std::string> statistics;
  std::vector<std::string> others;
  for (const std::string& name : names) (is_statistic(name) ? statistics : others).push_back(name);
  std::string text =
      ". Each rank keeps its own. A checkpoint keeps those of every rank for a run on as many "
      "ranks; another number of ranks and save_16bit_model() get rank 0's";
  if (!statistics.empty()) {
    text = cat(listed(statistics, kMostBuffersNamed),
               " (running statistics of BatchNorm: \"sync_batchnorm\": true computes them over all ",
               "ranks, \"broadcast_buffers\": true gives all ranks those of rank 0)", text);
  }
  if (others.empty()) return text;
  return cat(listed(others, kMostBuffersNamed),
             " (state of the program's: right where each rank keeps its own, as a hidden state, a queue ",
             "or a field; else compute it from values that all ranks share)", statistics.empty() ? "" : ", ", text);
}

}  // namespace ds::engine
