#include "pipeline/open_pairs.h"

#include <ATen/ops/full.h>

#include <string>

#include "core/check.h"
#include "pipeline/schedule/message_route.h"

namespace ds::pipeline {
namespace {

void open(comm::Communicator& ranks, int sender, int receiver, c10::Device device) {
  const bool sends = ranks.rank() == sender;
  if (!sends && ranks.rank() != receiver) return;
  const std::string label = cat("first message of rank ", sender, " to rank ", receiver);
  const at::Tensor token = at::full({1}, sends ? sender : -1, at::TensorOptions().dtype(at::kInt).device(device));
  (sends ? ranks.isend(token, receiver, 0, label) : ranks.irecv(token, sender, 0, label)).wait();
  ensure(token.item<int>() == sender, "the first message of a pair is its sender's number");
}

}  // namespace

// All ranks go through the pairs in one order: those of the lowest pair that is not done are both at it.
void open_pairs(const std::vector<int>& rank_of, comm::Communicator& ranks, c10::Device device) {
  for (const auto& [low, high] : neighbouring_ranks(rank_of)) {
    open(ranks, low, high, device);
    open(ranks, high, low, device);
  }
}

}  // namespace ds::pipeline
