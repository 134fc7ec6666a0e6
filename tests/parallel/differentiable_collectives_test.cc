// Collectives with a gradient, beside the same arithmetic in one process: all ranks' inputs in one graph, whose losses
// are added.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "dsengine/collectives.h"
#include "dsengine/errors.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// What one rank computes with a collective, and what it is of the inputs of all ranks.
struct CollectiveCase {
  std::string name;
  std::function<at::Tensor(const at::Tensor& own, comm::Communicator& group)> call;
  std::function<at::Tensor(const std::vector<at::Tensor>& all, int rank)> expected;
};

at::Tensor input_of(int rank, int64_t rows = 6) {
  return torch::sin(torch::arange(rows * 4, torch::kDouble) * 0.7 + rank * 1.3).view({rows, 4});
}

// Another one on each rank, and no linear function: its gradient has a gradient.
at::Tensor loss_of(const at::Tensor& result, int rank) {
  const at::Tensor weights =
      torch::cos(torch::arange(result.numel(), torch::kDouble) * 0.3 + rank).view(result.sizes());
  return (weights * result.pow(3)).sum();
}

at::Tensor sum_of(const std::vector<at::Tensor>& all) {
  return std::accumulate(all.begin() + 1, all.end(), all.front(), [](const auto& a, const auto& b) { return a + b; });
}

at::Tensor part_of_rank(const at::Tensor& whole, int rank, size_t ranks, int64_t dim = 0) {
  return whole.chunk(static_cast<int64_t>(ranks), dim)[static_cast<size_t>(rank)];
}

// Rank r sends (r + j) % 3 rows to rank j, of two or three ranks.
std::vector<int64_t> rows_between(int rank, int ranks) {
  std::vector<int64_t> rows;
  for (int other = 0; other < ranks; ++other) rows.push_back((rank + other) % 3);
  return rows;
}

int64_t total(const std::vector<int64_t>& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

std::vector<CollectiveCase> cases() {
  using comm::ReduceOp;
  return {
      {"all_gather", [](const auto& own, auto& group) { return all_gather(own, group); },
       [](const auto& all, int) { return torch::cat(all); }},
      {"all_gather of the last dimension", [](const auto& own, auto& group) { return all_gather(own, group, -1); },
       [](const auto& all, int) { return torch::cat(all, 1); }},
      {"all_reduce", [](const auto& own, auto& group) { return all_reduce(own, group); },
       [](const auto& all, int) { return sum_of(all); }},
      {"mean", [](const auto& own, auto& group) { return all_reduce(own, group, ReduceOp::kAvg); },
       [](const auto& all, int) { return sum_of(all) / static_cast<double>(all.size()); }},
      {"reduce_scatter", [](const auto& own, auto& group) { return reduce_scatter(own, group); },
       [](const auto& all, int rank) { return part_of_rank(sum_of(all), rank, all.size()); }},
      {"reduce_scatter, mean",
       [](const auto& own, auto& group) { return reduce_scatter(own.t(), group, 1, ReduceOp::kAvg); },
       [](const auto& all, int rank) {
         return part_of_rank(sum_of(all).t() / static_cast<double>(all.size()), rank, all.size(), 1);
       }},
      {"all_to_all", [](const auto& own, auto& group) { return all_to_all(own, group); },
       [](const auto& all, int rank) {
         std::vector<at::Tensor> parts;
         for (const at::Tensor& one : all) parts.push_back(part_of_rank(one, rank, all.size()));
         return torch::cat(parts);
       }},
      {"all_to_all of uneven parts",
       [](const auto& own, auto& group) {
         const auto rows = rows_between(group.rank(), group.size());  // symmetric: as many come back
         return all_to_all(own.narrow(0, 0, total(rows)), group, rows, rows);
       },
       [](const auto& all, int rank) {
         std::vector<at::Tensor> parts;
         for (size_t other = 0; other < all.size(); ++other) {
           const auto rows = rows_between(static_cast<int>(other), static_cast<int>(all.size()));
           const int64_t begin = std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0});
           parts.push_back(all[other].narrow(0, begin, rows[static_cast<size_t>(rank)]));
         }
         return torch::cat(parts);
       }},
  };
}

// Values, the gradient of the sum of all ranks' losses, and the gradient of its squares.
TEST(DifferentiableCollectives, AreTheArithmeticOfOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    for (const CollectiveCase& tried : cases()) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < ranks; ++rank) all.push_back(input_of(rank).requires_grad_());
      std::vector<at::Tensor> results;
      at::Tensor loss = torch::zeros({}, torch::kDouble);
      for (int rank = 0; rank < ranks; ++rank) {
        results.push_back(tried.expected(all, rank));
        loss = loss + loss_of(results.back(), rank);
      }
      const auto first = torch::autograd::grad({loss}, all, {}, true, /*create_graph=*/true);
      at::Tensor squares = torch::zeros({}, torch::kDouble);
      for (const at::Tensor& gradient : first) squares = squares + gradient.pow(2).sum();
      const auto second = torch::autograd::grad({squares}, all);
      test::run_ranks(ranks, [&](comm::Communicator& group) {
        const auto own_rank = static_cast<size_t>(group.rank());
        const at::Tensor own = input_of(group.rank()).requires_grad_();
        const at::Tensor result = tried.call(own, group);
        EXPECT_LT(relative_error(result, results[own_rank]), 1e-12) << tried.name;
        const at::Tensor gradient =
            torch::autograd::grad({loss_of(result, group.rank())}, {own}, {}, true, /*create_graph=*/true)[0];
        EXPECT_LT(relative_error(gradient, first[own_rank]), 1e-12) << tried.name << ", gradient";
        const at::Tensor again = torch::autograd::grad({gradient.pow(2).sum()}, {own})[0];
        EXPECT_LT(relative_error(again, second[own_rank]), 1e-12) << tried.name << ", gradient of the gradient";
        const at::NoGradGuard no_grad;
        EXPECT_FALSE(tried.call(own, group).requires_grad());
      });
    }
  }
}

TEST(DifferentiableCollectives, RefuseWhatCannotBe) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const at::Tensor rows = input_of(0, 3);
    EXPECT_THAT([&] { all_gather(at::Tensor(), group); }, ThrowsMessage<UsageError>(HasSubstr("all_gather: expected")));
    EXPECT_THAT([&] { all_gather(torch::tensor(1.0), group); }, ThrowsMessage<UsageError>(HasSubstr("unsqueeze(0)")));
    EXPECT_THAT([&] { all_gather(rows, group, 2); }, ThrowsMessage<UsageError>(HasSubstr("dim: expected")));
    EXPECT_THAT([&] { all_reduce(rows, group, comm::ReduceOp::kMax); },
                ThrowsMessage<UsageError>(HasSubstr("expected kSum or kAvg")));
    EXPECT_THAT([&] { all_reduce(torch::tensor({1}), group, comm::ReduceOp::kAvg); },
                ThrowsMessage<UsageError>(HasSubstr("floating-point numbers for kAvg")));
    EXPECT_THAT(
        [&] { reduce_scatter(rows, group); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("dimension 0 to divide by the 2 ranks"), HasSubstr("[3, 4]"))));
    EXPECT_THAT([&] { all_to_all(rows, group); }, ThrowsMessage<UsageError>(HasSubstr("pass output_splits")));
    EXPECT_THAT(
        [&] {
          all_to_all(rows, group, {}, {1, 2});
        },
        ThrowsMessage<UsageError>(HasSubstr("found input_splits alone")));
    EXPECT_THAT(
        [&] {
          all_to_all(rows, group, {1, 1}, {1, 1});
        },
        ThrowsMessage<UsageError>(HasSubstr("add up to the 3 rows, found 2")));
    EXPECT_THAT(
        [&] {
          all_to_all(rows, group, {4, -1}, {1, 2});
        },
        ThrowsMessage<UsageError>(HasSubstr("found [4, -1]")));
  });
}

// Shapes that differ are an error on both ranks, also where one of them has no rows.
TEST(DifferentiableCollectives, TellShapesThatDiffer) {
  using Call = std::function<at::Tensor(const at::Tensor&, comm::Communicator&)>;
  const std::vector<Call> calls = {[](const auto& own, auto& group) { return all_gather(own, group); },
                                   [](const auto& own, auto& group) { return all_reduce(own, group); },
                                   [](const auto& own, auto& group) { return reduce_scatter(own, group); },
                                   [](const auto& own, auto& group) { return all_to_all(own, group); }};
  for (const int64_t rows : {4, 0}) {
    for (size_t call = 0; call < calls.size(); ++call) {
      EXPECT_THAT(([&] {
                    test::run_ranks(2, [&](comm::Communicator& group) {
                      calls[call](input_of(0, group.rank() == 0 ? 6 : rows), group);
                    });
                  }),
                  ThrowsMessage<std::runtime_error>(
                      AnyOf(HasSubstr("different collectives"), HasSubstr("output_splits here must equal"))))
          << "call " << call << ", " << rows << " rows";
    }
  }
}

// The tensor of a tensor axis goes over another group as a full one.
TEST(DifferentiableCollectives, TakeSplitTensorsAsFullOnes) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const at::Tensor own = input_of(0).requires_grad_();
    const auto axis = make_axis(shared(group));
    const at::Tensor gathered = all_gather(distribute(own, axis, 0), group);
    EXPECT_LT(relative_error(gathered, torch::cat({own, own})), 1e-12);
    EXPECT_FALSE(is_split(gathered));
  });
}

}  // namespace
}  // namespace ds::parallel
