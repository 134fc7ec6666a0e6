// Copies beside the compute. On the CPU they are made at once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "core/check.h"
#include "core/device/transfer_stream.h"

namespace ds::offload {
namespace {

TEST(TransferStream, OnTheCpuACopyIsMadeAtOnce) {
  TransferStream stream(at::kCPU);
  const at::Tensor from = torch::randn({1000});
  const at::Tensor to = torch::zeros({1000});
  TransferStream::Mark mark = stream.copy(to, from);
  EXPECT_TRUE(at::equal(to, from));
  stream.wait_on_device(mark);
  stream.wait_on_host(mark);
  stream.wait_on_host(mark);  // passed already
  TransferStream::Mark none;
  stream.wait_on_host(none);
  stream.wait_on_device(none);
}

TEST(TransferStream, ConvertsDtypes) {
  TransferStream stream(at::kCPU);
  const at::Tensor values = torch::randn({1000});
  const at::Tensor half = torch::zeros({1000}, at::kBFloat16);
  stream.copy(half, values);
  EXPECT_TRUE(at::equal(half, values.to(at::kBFloat16)));
  const at::Tensor back = torch::zeros({1000});
  stream.copy(back, half);
  EXPECT_TRUE(at::equal(back, values.to(at::kBFloat16).to(at::kFloat)));
}

TEST(TransferStream, IsNotSeenByAutograd) {
  TransferStream stream(at::kCPU);
  const at::Tensor parameter = torch::ones({8}).requires_grad_(true);
  const at::Tensor copy = torch::zeros({8});
  stream.copy(copy, parameter);
  EXPECT_FALSE(copy.requires_grad());
  stream.copy(parameter, torch::full({8}, 3.0));  // of a leaf that requires a gradient
  EXPECT_EQ(parameter.sum().item<double>(), 24.0);
  EXPECT_TRUE(parameter.is_leaf());
}

TEST(TransferStream, BothEndsAreAlike) {
  TransferStream stream(at::kCPU);
  EXPECT_THROW(stream.copy(torch::zeros({4}), torch::zeros({1})), InternalError) << "nothing is broadcast";
  EXPECT_THROW(stream.copy(torch::zeros({4, 4}).t(), torch::zeros({4, 4})), InternalError);
  EXPECT_THROW(stream.copy(torch::zeros({4, 4}), torch::zeros({4, 4}).t()), InternalError);
}

}  // namespace
}  // namespace ds::offload
