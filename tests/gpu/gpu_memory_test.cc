// Memory that travels between a GPU and the host: pinned regions, copies beside the compute, gradients that arrive,
// weights that return, batches of a loader.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "core/device/transfer_stream.h"
#include "dsengine/loader.h"
#include "offload/host_gradients.h"
#include "offload/pinned_arena.h"
#include "offload/update_copies.h"
#include "tests/gpu/tested_device.h"
#include "tests/recompute/region_gradients.h"

namespace ds::offload {
namespace {

using test::device_is_simulated;
using test::tested_device;

constexpr int64_t kLong = int64_t{1} << 22;  // elements: a copy of 16 MiB takes longer than its launch

at::TensorOptions on_device() { return torch::dtype(at::kFloat).device(tested_device()); }

// Host memory of `count` tensors, pinned where the device is a GPU.
std::vector<at::Tensor> pinned(size_t count, int64_t numel, at::ScalarType dtype = at::kFloat) {
  PinnedArena arena("a test", count * PinnedArena::bytes_of(numel, dtype), {.device = tested_device()});
  EXPECT_EQ(arena.pinned(), tested_device().is_cuda());
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < count; ++i) tensors.push_back(arena.take(numel, dtype));
  return tensors;
}

// Keeps the current stream busy; returns zeros that exist only when it is through.
at::Tensor zeros_after_long_work(int64_t numel) {
  const int64_t side = tested_device().is_cuda() && !device_is_simulated() ? 4096 : 64;
  at::Tensor matrix = torch::full({side, side}, 1.0F / static_cast<float>(side), on_device());
  for (int i = 0; i < 20; ++i) matrix = matrix.matmul(matrix);
  return torch::zeros({numel}, on_device()).add_(matrix[0][0], 0);
}

TEST(GpuPinnedArena, LibTorchKnowsThatItIsPinned) {
  const at::Tensor there = torch::empty({kLong}, on_device());  // LibTorch calls nothing pinned before it has used CUDA
  const at::Tensor host = pinned(1, kLong)[0];
  EXPECT_EQ(tested_device().is_cuda() && host.is_pinned(), tested_device().is_cuda());
  const at::Tensor values = torch::randn({kLong});
  host.copy_(values);
  there.copy_(host, /*non_blocking=*/true);
  EXPECT_TRUE(at::equal(there.cpu(), values));
}

TEST(GpuTransferStream, CopiesWhatTheCurrentStreamWillHaveMade) {
  const at::Tensor host = pinned(1, kLong)[0];
  TransferStream stream(tested_device());
  for (int round = 1; round <= 3; ++round) {
    const at::Tensor made = zeros_after_long_work(kLong).add_(round);
    TransferStream::Mark mark = stream.copy(host, made);
    stream.wait_on_host(mark);
    EXPECT_TRUE(host.eq(round).all().item<bool>()) << round;
  }
}

TEST(GpuTransferStream, TheCurrentStreamWaitsWhereItIsToldTo) {
  const std::vector<at::Tensor> host = pinned(2, kLong);
  TransferStream stream(tested_device());
  const at::Tensor there = torch::zeros({kLong}, on_device());
  for (int round = 1; round <= 5; ++round) {
    const at::Tensor& from = host[static_cast<size_t>(round % 2)].fill_(round);
    TransferStream::Mark mark = stream.copy(there, from);
    stream.wait_on_device(mark);
    EXPECT_TRUE(there.clone().eq(round).all().item<bool>()) << round;
  }
}

TEST(GpuTransferStream, DeviceMemoryMayGoRightAfterACall) {
  constexpr size_t kCopies = 8;
  const std::vector<at::Tensor> host = pinned(kCopies, kLong);
  TransferStream stream(tested_device());
  std::vector<TransferStream::Mark> marks;
  for (size_t i = 0; i < kCopies; ++i) {
    marks.push_back(stream.copy(host[i], torch::full({kLong}, static_cast<float>(i), on_device())));
    torch::full({kLong}, -1.0F, on_device());  // takes memory that is free
  }
  for (size_t i = 0; i < kCopies; ++i) {
    stream.wait_on_host(marks[i]);
    EXPECT_TRUE(host[i].eq(static_cast<double>(i)).all().item<bool>()) << i;
  }
}

TEST(GpuTransferStream, ConvertsDtypes) {
  const at::Tensor half = pinned(1, kLong, at::kBFloat16)[0];
  TransferStream stream(tested_device());
  const at::Tensor values = torch::randn({kLong});
  TransferStream::Mark mark = stream.copy(half, values.to(tested_device()));
  stream.wait_on_host(mark);
  EXPECT_TRUE(at::equal(half, values.to(at::kBFloat16)));
}

// It belongs to the stream of copies, is used on the current one, and goes before either has come so far.
TEST(GpuTransferStream, UploadsWhatMayChangeAtOnce) {
  TransferStream stream(tested_device());
  at::Tensor sum = torch::zeros({kLong}, on_device());
  at::Tensor host = torch::empty({kLong});
  for (int round = 1; round <= 5; ++round) {
    sum += stream.upload(host.fill_(round));
    host.fill_(NAN);
    torch::full({kLong}, -1.0F, on_device());  // takes memory that is free
  }
  EXPECT_TRUE(sum.eq(15.0).all().item<bool>());
  const at::Tensor there = stream.upload(sum);
  EXPECT_TRUE(there.is_same(sum));
  const at::Tensor leaf = torch::ones({4}).requires_grad_(true);
  stream.upload(leaf).sum().backward();
  EXPECT_TRUE(leaf.grad().eq(1.0).all().item<bool>());
}

TEST(GpuTransferStream, UploadsSparseTensors) {
  if (device_is_simulated()) GTEST_SKIP() << "the simulated GPU has no sparse tensors";
  TransferStream stream(tested_device());
  const at::Tensor sparse = stream.upload(torch::eye(3).to_sparse());
  EXPECT_TRUE(sparse.is_cuda() && sparse.is_sparse());
  EXPECT_TRUE(sparse.to_dense().cpu().equal(torch::eye(3)));
}

class GpuHostGradients : public ::testing::TestWithParam<at::ScalarType> {};

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuHostGradients, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

// The device overwrites what it gave, as the reducer does; buckets arrive last to first, added on the host in order.
TEST_P(GpuHostGradients, ArriveInPinnedMemory) {
  const at::ScalarType dtype = GetParam();
  const std::vector<int64_t> lengths{kLong, 17, 70001, 1};
  std::vector<at::Tensor> slices = pinned(lengths.size(), kLong, dtype);
  for (size_t b = 0; b < lengths.size(); ++b) slices[b] = slices[b].narrow(0, 0, lengths[b]).fill_(NAN);
  HostGradients gradients(slices, tested_device(), pinned(2, kLong, dtype));
  for (int step = 0; step < 2; ++step) {
    gradients.clear();
    std::vector<at::Tensor> expected(lengths.size());
    for (int micro_batch = 0; micro_batch < 4; ++micro_batch) {
      for (size_t b = lengths.size(); b-- > 0;) {
        const at::Tensor own = torch::randn({lengths[b]}).to(dtype);
        expected[b] = micro_batch == 0 ? own.clone() : expected[b] + own;
        const at::Tensor there = zeros_after_long_work(lengths[b]).to(dtype).add_(own.to(tested_device()));
        gradients.add(b, there);
        there.fill_(NAN);
      }
    }
    for (size_t b = 0; b < lengths.size(); ++b) {
      EXPECT_TRUE(at::equal(gradients.gradient(b), expected[b])) << "step " << step << ", bucket " << b;
      EXPECT_EQ(gradients.gradient(b).data_ptr(), slices[b].data_ptr());
    }
  }
}

TEST(GpuWriteBack, TheCurrentStreamSeesTheNewWeights) {
  constexpr size_t kSlices = 5;
  WriteBack back(tested_device(), pinned(2, kLong));
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < kSlices; ++i) {
    const auto numel = kLong - static_cast<int64_t>(1000 * i);
    weights.push_back(torch::zeros({numel}, on_device()));
  }
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < kSlices; ++i) {
      const auto value = static_cast<double>(10 * round + static_cast<int>(i));
      back.send(weights[i], [&](const at::Tensor& buffer) { buffer.fill_(value); });
    }
    for (size_t i = 0; i < kSlices; ++i) {
      EXPECT_TRUE(weights[i].eq(static_cast<double>(10 * round + static_cast<int>(i))).all().item<bool>()) << i;
    }
  }
}

// A chain of regions whose inputs leave for the host and return, twice, in memory that is given out again.
TEST(GpuKeptInputs, ReturnAsTheyWere) {
  for (const bool slots : {false, true}) {
    recompute::CheckpointOptions options{.cpu_checkpointing = true};
    if (slots) {
      options.contiguous_memory_optimization = true;
      options.number_checkpoints = 6;
    }
    recompute::configure_checkpointing(options);
    const at::Tensor input = recompute::waves({64, 64}, 0.3).to(tested_device()).requires_grad_(true);
    const at::Tensor weight = (recompute::waves({64, 64}, 1.1) / 8).to(tested_device()).requires_grad_(true);
    const auto train = [&](const recompute::Around& around) {
      at::Tensor x = input;
      for (int region = 0; region < 6; ++region) {
        x = around([&](const recompute::Tensors& of) -> recompute::Tensors { return {of[0].mm(weight).tanh()}; },
                   {x})[0];
      }
      torch::full({64, 64}, -1.0F, on_device());  // takes memory that is free
      return x.pow(2).sum();
    };
    for (int step = 0; step < 2; ++step) {
      const at::Tensor plain = train(recompute::plainly);
      plain.backward();
      const std::vector<at::Tensor> expected = {input.grad().clone(), weight.grad().clone()};
      for (const at::Tensor& leaf : {input, weight}) leaf.mutable_grad().reset();
      const at::Tensor loss = train(recompute::as_region);
      loss.backward();
      EXPECT_TRUE(at::equal(loss, plain));
      EXPECT_TRUE(at::equal(input.grad(), expected[0]) && at::equal(weight.grad(), expected[1])) << "slots " << slots;
      for (const at::Tensor& leaf : {input, weight}) leaf.mutable_grad().reset();
    }
  }
  recompute::configure_checkpointing({});
}

// Sample i is full of i.
struct LongRows {
  static at::Tensor get(size_t index) { return torch::full({kLong / 8}, static_cast<float>(index)); }
  static size_t size() { return 24; }
};

// The workers pin; memory of a batch goes while the stream that used it has not come so far.
TEST(GpuLoader, BatchesOfWorkersArriveForTheCurrentStream) {
  data::Loader loader(LongRows(), {.batch_size = 4,
                                   .shuffle = false,
                                   .device = tested_device(),
                                   .reading = {.num_workers = 2, .prefetch_factor = 1}});
  at::Tensor sum = torch::zeros({kLong / 8}, on_device());
  for (const at::Tensor& batch : loader) {
    EXPECT_EQ(batch.device(), sum.device());
    sum += batch.sum(0);
    torch::full({kLong / 2}, -1.0F, on_device());  // takes memory that is free
  }
  EXPECT_TRUE(sum.eq(23.0 * 24 / 2).all().item<bool>());
}

TEST(GpuLoader, BatchesForTheHostArePinnedWhereThatIsAsked) {
  if (!tested_device().is_cuda()) GTEST_SKIP() << "no accelerator pins";
  data::Loader loader(LongRows(),
                      {.batch_size = 4, .shuffle = false, .reading = {.num_workers = 2, .pin_memory = true}});
  auto batch = loader.begin();
  EXPECT_TRUE(batch->is_pinned());
  EXPECT_EQ((*batch)[3][0].item<float>(), 3.0F);
}

}  // namespace
}  // namespace ds::offload
