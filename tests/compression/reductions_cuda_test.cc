// Reductions that remember what they do not send, on devices: what is finite is judged there, the host waits for
// nothing, and what is sent and remembered is what it is on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "compression/sign_reduction.h"
#include "compression/top_k_reduction.h"
#include "core/text.h"
#include "tests/compression/reduction_runs.h"
#include "tests/gpu/host_waits.h"
#include "tests/gpu/nccl_ranks.h"

namespace ds::test {
namespace {

constexpr int64_t kCompressedNumel = 1212;
constexpr double kInfiniteValue = std::numeric_limits<double>::infinity();

struct CompressedCase {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool scatter = false;
  bool feedback = true;
};

std::unique_ptr<BucketReduction> reduction_of(const std::string& name, const compression::ExchangeGroups& groups,
                                              at::Device device, bool feedback) {
  compression::ErrorMemory errors({kCompressedNumel}, device, feedback);
  if (name == "top_k") {
    return std::make_unique<compression::TopKReduction>(groups.first, std::move(errors), 0.03);
  }
  if (name == "sign") {
    const compression::SignBucket bucket{kCompressedNumel, {{0, 1200}, {1200, 12}}};
    return std::make_unique<compression::SignReduction>(groups.first, std::vector{bucket}, device, feedback);
  }
  return std::make_unique<compression::BlockQuantizedReduction>(groups, std::move(errors), name == "int8" ? 8 : 4);
}

struct CompressedRun {
  std::vector<at::Tensor> results;  // of each step, then what is remembered
  Waits waits;                      // of the middle steps, of all ranks
};

// Rank 1 has a gradient that is not finite in the third step; the loss scale changes on the way.
CompressedRun compressed_run(Communicator& ranks, at::Device device, const CompressedCase& cell, std::barrier<>* all) {
  const auto reduction = reduction_of(cell.name, exchange_groups(lent(ranks)), device, cell.feedback);
  CompressedRun run;
  std::vector<at::Tensor> gradients;
  for (int64_t step = 0; step < 6; ++step) {
    at::Tensor gradient = gradient_of(kCompressedNumel, ranks.rank(), step, cell.dtype);
    if (step == 2 && ranks.rank() == 1) gradient[700] = kInfiniteValue;
    gradients.push_back(gradient.to(device));
  }
  const auto count = [&](Waits& waits) {
    if (all == nullptr) return;
    all->arrive_and_wait();
    if (ranks.rank() == 0) waits = take_waits();
    all->arrive_and_wait();
  };
  Waits before;
  for (int64_t step = 0; step < 6; ++step) {
    if (step == 1) count(before);
    reduction->begin_pass(step, step < 4 ? 8.0 : 2.0);
    const at::Tensor flat = gradients[static_cast<size_t>(step)];
    const at::Tensor own = cell.scatter ? flat.chunk(ranks.size())[static_cast<size_t>(ranks.rank())] : flat;
    reduction->start(0, own, flat, ReduceOp::kSum, "gradients").wait();
    run.results.push_back(own);
  }
  count(run.waits);
  for (at::Tensor& result : run.results) result = result.cpu().to(at::kFloat);
  for (const auto& [name, tensor] : reduction->memory()) run.results.push_back(tensor.cpu().clone());
  return run;
}

class GpuCompression : public ::testing::TestWithParam<CompressedCase> {};

std::vector<CompressedCase> compressed_cases() {
  std::vector<CompressedCase> cells;
  for (const char* name : {"top_k", "int8", "int4", "sign"}) {
    for (const bool scatter : {false, true}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) cells.push_back({name, dtype, scatter, true});
    }
    cells.push_back({name, at::kBFloat16, true, false});
  }
  return cells;
}

INSTANTIATE_TEST_SUITE_P(Methods, GpuCompression, ::testing::ValuesIn(compressed_cases()), [](const auto& cell) {
  return cat(cell.param.name, c10::toString(cell.param.dtype), cell.param.scatter ? "Scatter" : "",
             cell.param.feedback ? "" : "Forgets");
});

// Scales of signs are sums, which a real GPU adds up in another order.
TEST_P(GpuCompression, DoesWhatTheCpuDoesWithoutAWait) {
  const CompressedCase& cell = GetParam();
  if (const std::string why = missing_gpus(2); !why.empty()) GTEST_SKIP() << why;
  std::vector<CompressedRun> expected(2);
  run_ranks(2, [&](Communicator& ranks) {
    expected[static_cast<size_t>(ranks.rank())] = compressed_run(ranks, at::kCPU, cell, nullptr);
  });
  const bool exact = device_is_simulated() || cell.name != "sign";
  std::barrier all(2);
  on_gpus(2, [&](Communicator& ranks, at::Device device) {
    const CompressedRun found = compressed_run(ranks, device, cell, device_is_simulated() ? &all : nullptr);
    const CompressedRun& here = expected[static_cast<size_t>(ranks.rank())];
    ASSERT_EQ(found.results.size(), here.results.size());
    for (size_t i = 0; i < found.results.size(); ++i) {
      EXPECT_TRUE(torch::allclose(found.results[i], here.results[i], exact ? 0 : 1e-5, exact ? 0 : 1e-5, true))
          << (i < 6 ? "step " : "memory ") << i;
    }
    EXPECT_FALSE(here.results[2].isfinite().all().item<bool>() && !cell.scatter) << "the overflow arrives";
    EXPECT_TRUE(here.results[5].isfinite().all().item<bool>());
    EXPECT_EQ(text_of(found.waits), "");
  });
}

// Ties, zeros of both signs and Inf; on the CPU and by keys.
TEST(GpuLargestElements, AreThoseOfTheCpu) {
  const at::Device device = tested_device();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t numel : {1, 2, 100, 5000}) {
      at::Tensor values = gradient_of(numel, 0, 1, type);
      values.slice(0, 0, numel, 3).fill_(0.25);
      values.slice(0, 1, numel, 7).fill_(-0.25);
      values.slice(0, 0, numel, 11).fill_(-0.0);
      if (numel > 50) values[50] = -kInfiniteValue;
      for (const int64_t count : {int64_t{0}, int64_t{1}, numel / 3, numel / 2, numel - 1, numel}) {
        const auto sorted = [](const at::Tensor& positions) { return std::get<0>(positions.cpu().sort()); };
        EXPECT_TRUE(torch::equal(sorted(compression::largest_elements(values.to(device), count)),
                                 sorted(compression::largest_elements(values, count))))
            << type << ", " << count << " of " << numel;
      }
    }
  }
}

}  // namespace
}  // namespace ds::test
