// Collectives on tensors of a device.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/comm.h"
#include "tests/comm/reduction_reference.h"

namespace ds::test {

// Sums of two ranks and more in 16 bits: a backend may round after each addition.
inline bool same_sums(const at::Tensor& found, const at::Tensor& expected) {
  if (expected.scalar_type() != at::kBFloat16) return at::equal(found, expected);
  return at::allclose(found, expected, /*rtol=*/0x1p-6, /*atol=*/0x1p-6);
}

// Every operation on tensors of `device` against the reference on the CPU.
inline void expect_every_collective(comm::Communicator& ranks, at::Device device) {
  const auto there = [device](const at::Tensor& tensor) { return tensor.to(device); };
  const int world = ranks.size();
  const int rank = ranks.rank();
  for (const int64_t n : {int64_t{1}, int64_t{1000}, int64_t{150001}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kInt}) {
      SCOPED_TRACE(::testing::Message() << n << " elements " << dtype);
      const at::Tensor own = rank_values(n * world, dtype, rank);
      const at::Tensor sum = reduced_values(world, n * world, dtype, comm::ReduceOp::kSum);

      at::Tensor tensor = there(own).clone();
      ranks.all_reduce(tensor).wait();
      EXPECT_EQ(tensor.device(), device);
      EXPECT_TRUE(same_sums(tensor.cpu(), sum));

      at::Tensor part = torch::zeros({n}, tensor.options());
      ranks.reduce_scatter(part, there(own)).wait();
      EXPECT_TRUE(same_sums(part.cpu(), sum.narrow(0, n * rank, n)));

      tensor.zero_();
      ranks.all_gather(tensor, part).wait();
      EXPECT_TRUE(same_sums(tensor.cpu(), sum));

      part = there(rank_values(n, dtype, rank)).clone();
      ranks.broadcast(part, world - 1).wait();
      EXPECT_TRUE(at::equal(part.cpu(), rank_values(n, dtype, world - 1)));
    }
  }
  at::Tensor output = there(torch::zeros({world * 3}, at::kLong));
  ranks.all_to_all(output, there(torch::full({world * 3}, rank, at::kLong))).wait();
  EXPECT_TRUE(at::equal(output.cpu(), torch::arange(world).repeat_interleave(3)));

  // Around a ring. A first message between two ranks may block until both have come to it: one of them receives first.
  at::Tensor got = there(torch::zeros({1001}));
  const int last = (rank + world - 1) % world;
  if (rank == 0 && world > 1) ranks.recv(got, last);
  const comm::Work sent = ranks.isend(there(rank_values(1001, at::kFloat, rank)), (rank + 1) % world);
  if (rank != 0 || world == 1) ranks.recv(got, last);
  sent.wait();
  EXPECT_TRUE(at::equal(got.cpu(), rank_values(1001, at::kFloat, last)));
  ranks.barrier();
}

}  // namespace ds::test
