// All-reduce of signs against plain loops, and what error feedback promises.
#include "compression/compressed_all_reduce.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/compression/exchange_reference.h"
#include "tests/support/thread_ranks.h"

namespace ds::compression {
namespace {

using reference::Layout;
using reference::Values;
using test::run_ranks;

// Parameters of these lengths, each from a multiple of 16 on.
Layout layout_of(const std::vector<int64_t>& lengths, int64_t tail = 0) {
  Layout layout;
  for (const int64_t length : lengths) {
    const int64_t begin = (layout.numel + 15) / 16 * 16;
    layout.parameters.emplace_back(begin, begin + length);
    layout.numel = begin + length;
  }
  layout.numel += tail;
  return layout;
}

std::vector<ScaleRange> ranges_of(const Layout& layout) {
  std::vector<ScaleRange> ranges;
  for (const auto& [begin, end] : layout.parameters) ranges.push_back({begin, end - begin});
  return ranges;
}

// Some are 0, some negative, and parameters differ in size.
Values values_of(const Layout& layout, int rank, int step) {
  Values values(static_cast<size_t>(layout.numel), 0.0F);
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    for (int64_t i = layout.parameters[p].first; i < layout.parameters[p].second; ++i) {
      const double x = std::sin(0.37 * static_cast<double>(i) + 1.9 * rank + 0.61 * step);
      values[i] = static_cast<float>(std::abs(x) < 0.05 ? 0.0 : x * std::pow(10.0, static_cast<double>(p % 4) - 2));
    }
  }
  return values;
}

at::Tensor tensor_of(const Values& values) {
  return torch::from_blob(const_cast<float*>(values.data()), {static_cast<int64_t>(values.size())}).clone();
}

bool same_bits(const at::Tensor& tensor, const Values& values) {
  return tensor.numel() == static_cast<int64_t>(values.size()) &&
         std::memcmp(tensor.const_data_ptr(), values.data(), tensor.nbytes()) == 0;
}

struct Shape {
  std::vector<int64_t> lengths;
  int64_t tail = 0;
};

class CompressedAllReduceTest : public ::testing::TestWithParam<int> {};

TEST_P(CompressedAllReduceTest, EqualsPlainLoopsBitByBitForManyLengths) {
  const std::vector<Shape> shapes = {{{1}},
                                     {{7}},
                                     {{8}},
                                     {{9, 1, 3}},
                                     {{64}, 16},
                                     {{100, 5, 333}},
                                     {{1000, 24}},
                                     {{3, 3, 3, 3}, 7},
                                     {{4096, 1, 511}, 64}};
  const int world = GetParam();
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(cat("first length ", shape.lengths.front(), " of ", shape.lengths.size()));
    const Layout layout = layout_of(shape.lengths, shape.tail);
    reference::Exchange expected(layout, world);
    std::vector<Values> results;
    for (int step = 0; step < 6; ++step) {
      std::vector<Values> all;
      for (int rank = 0; rank < world; ++rank) all.push_back(values_of(layout, rank, step));
      results.push_back(expected.mean(all));
    }
    run_ranks(world, [&](comm::Communicator& communicator) {
      const CompressedAllReduce all_reduce(communicator, ranges_of(layout), layout.numel);
      const at::Tensor error = torch::zeros({layout.numel});
      const at::Tensor server = torch::zeros({all_reduce.own_numel()});
      const at::Tensor result = torch::empty({layout.numel});
      for (int step = 0; step < 6; ++step) {
        error.add_(tensor_of(values_of(layout, communicator.rank(), step)));
        all_reduce.decode(all_reduce.run(error, server, "test"), result);
        EXPECT_TRUE(same_bits(result, results[static_cast<size_t>(step)])) << "step " << step;
      }
    });
  }
}

TEST_P(CompressedAllReduceTest, WhatArrivedIsWhatWasSentButForWhatIsRemembered) {
  const int world = GetParam();
  const Layout layout = layout_of({50, 200, 17});
  const int steps = 40;
  at::Tensor sent = torch::zeros({layout.numel}, torch::kDouble);
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      sent += tensor_of(values_of(layout, rank, step)).to(torch::kDouble) / world;
    }
  }
  run_ranks(world, [&](comm::Communicator& communicator) {
    const CompressedAllReduce all_reduce(communicator, ranges_of(layout), layout.numel);
    const at::Tensor error = torch::zeros({layout.numel});
    const at::Tensor server = torch::zeros({all_reduce.own_numel()});
    const at::Tensor result = torch::empty({layout.numel});
    at::Tensor arrived = torch::zeros({layout.numel}, torch::kDouble);
    for (int step = 0; step < steps; ++step) {
      error.add_(tensor_of(values_of(layout, communicator.rank(), step)));
      all_reduce.decode(all_reduce.run(error, server, "test"), result);
      arrived += result.to(torch::kDouble);
    }
    at::Tensor remembered = error.to(torch::kDouble) / world;
    remembered.narrow(0, all_reduce.part_begin(communicator.rank()), all_reduce.own_numel()) += server;
    communicator.all_reduce(remembered).wait();
    EXPECT_LT((arrived + remembered - sent).abs().max().item<double>(), 2e-4);
    EXPECT_GT(remembered.abs().max().item<double>(), 1e-3);  // there is something to remember
  });
}

TEST_P(CompressedAllReduceTest, SendsOneBitAnElementEachWay) {
  const int world = GetParam();
  const int64_t numel = 1 << 20;
  run_ranks(world, [&](comm::Communicator& communicator) {
    const CompressedAllReduce all_reduce(communicator, {{0, numel / 2}, {numel / 2, numel / 2}}, numel);
    const at::Tensor error = torch::ones({numel});
    const at::Tensor server = torch::zeros({all_reduce.own_numel()});
    communicator.reset_counters();
    all_reduce.run(error, server, "test");
    const int64_t dense = 2 * 4 * numel * (world - 1) / world;
    EXPECT_GT(communicator.counters().total_bytes_sent(), 0);
    EXPECT_LE(communicator.counters().total_bytes_sent(), dense / 31);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CompressedAllReduceTest, ::testing::Values(2, 3, 4, 5));

TEST(CompressedAllReduce, AnInfinityIsSeenByAllRanks) {
  run_ranks(3, [&](comm::Communicator& communicator) {
    const CompressedAllReduce all_reduce(communicator, {{0, 40}, {48, 40}}, 96);
    const at::Tensor error = torch::ones({96});
    if (communicator.rank() == 1) error[3] = std::numeric_limits<float>::infinity();
    const at::Tensor server = torch::zeros({all_reduce.own_numel()});
    const at::Tensor result = torch::empty({96});
    all_reduce.decode(all_reduce.run(error, server, "test"), result);
    EXPECT_FALSE(result.narrow(0, 0, 8).isfinite().any().item<bool>());
    EXPECT_TRUE(result.narrow(0, 48, 40).isfinite().all().item<bool>());
  });
}

TEST(CompressedAllReduce, TensorsThatDoNotFitAreRefused) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    const CompressedAllReduce all_reduce(communicator, {{0, 16}}, 16);
    EXPECT_EQ(all_reduce.own_numel(), 16);
    EXPECT_THROW(all_reduce.run(torch::zeros({15}), torch::zeros({16}), "test"), UsageError);
    EXPECT_THROW(all_reduce.run(torch::zeros({16}), torch::zeros({8}), "test"), UsageError);
    EXPECT_THROW(all_reduce.run(torch::zeros({16}, torch::kDouble), torch::zeros({16}), "test"), UsageError);
    EXPECT_THROW(CompressedAllReduce(communicator, {{0, 17}}, 16), UsageError);
  });
}

}  // namespace
}  // namespace ds::compression
