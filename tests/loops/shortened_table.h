// An embedding with max_norm, whose forward shortens the rows that it looks up, and its training in one process.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace ds::test {

// A table that forward() shortens rows of, where they are longer than 1.
struct ShortenedTableImpl : torch::nn::Module {
  ShortenedTableImpl()
      : table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 6).max_norm(1.0)))) {
    const torch::NoGradGuard no_grad;  // torch's global generator is shared by ranks that are threads
    table->weight.copy_((torch::sin(torch::arange(60, torch::kDouble) * 0.7) * 1.2).view({10, 6}));
  }
  at::Tensor loss(const at::Tensor& rows) { return table(rows).pow(3).sum(1).mean(); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(ShortenedTable);

// The rows that a rank looks up: other ones than its neighbour, and in each step others.
inline at::Tensor rows_of(int64_t step, int rank) { return (torch::arange(3) + 3 * rank + 2 * step).remainder(10); }

inline constexpr int kTableSteps = 4;

// The table after training in one process that makes the lookups of all ranks.
inline at::Tensor table_of_plain_loop(int ranks) {
  ShortenedTable model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  for (int64_t step = 0; step < kTableSteps; ++step) {
    std::vector<at::Tensor> rows;
    for (int rank = 0; rank < ranks; ++rank) rows.push_back(rows_of(step, rank));
    optimizer.zero_grad();
    model->loss(torch::cat(rows)).backward();
    optimizer.step();
  }
  return model->table->weight.detach().clone();
}

}  // namespace ds::test
