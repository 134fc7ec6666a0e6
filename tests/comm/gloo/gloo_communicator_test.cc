// Gloo groups between threads of this process: every operation, data type and size against its definition.
#include "comm/gloo/gloo_communicator.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/collective.h"
#include "core/check.h"
#include "tests/support/gloo_threads.h"

namespace ds::comm {
namespace {

using ds::testing::on_gloo_threads;

const std::vector<at::ScalarType> kAllTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                               at::kByte,  at::kShort,  at::kInt,      at::kLong, at::kBool};

// Values that differ by rank, position and data type, the same wherever they are computed.
at::Tensor contribution(int rank, int64_t count, at::ScalarType dtype) {
  const at::Tensor wave = torch::sin(torch::arange(count, at::kDouble) * 0.37 + rank * 1.3) * 3.0;
  if (dtype == at::kBool) return wave > 0.5;
  return at::isFloatingType(dtype) ? wave.to(dtype) : (wave * 4.0).abs().to(dtype);
}

// In rank order, bf16 and fp16 in fp32 and rounded once.
at::Tensor reduced(int ranks, int64_t count, at::ScalarType dtype, ReduceOp op) {
  const bool half = dtype == at::kBFloat16 || dtype == at::kHalf;
  at::Tensor sum = contribution(0, count, dtype).to(half ? at::kFloat : dtype);
  for (int r = 1; r < ranks; ++r) {
    const at::Tensor next = contribution(r, count, dtype).to(sum.scalar_type());
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        sum = sum + next;
        break;
      case ReduceOp::kProduct:
        sum = sum * next;
        break;
      case ReduceOp::kMin:
        sum = torch::minimum(sum, next);
        break;
      case ReduceOp::kMax:
        sum = torch::maximum(sum, next);
        break;
      case ReduceOp::kBand:
        sum = torch::bitwise_and(sum, next);
        break;
      case ReduceOp::kBor:
        sum = torch::bitwise_or(sum, next);
        break;
      case ReduceOp::kBxor:
        sum = torch::bitwise_xor(sum, next);
        break;
    }
  }
  if (op == ReduceOp::kAvg) {
    sum = at::isFloatingType(sum.scalar_type()) ? sum / ranks : torch::floor_divide(sum, ranks);
  }
  return sum.to(dtype);
}

std::vector<ReduceOp> ops_of(at::ScalarType dtype) {
  using enum ReduceOp;
  if (dtype == at::kBool) return {kMin, kMax, kBand, kBor};
  if (at::isFloatingType(dtype)) return {kSum, kAvg, kProduct, kMin, kMax};
  return {kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor};
}

TEST(GlooReductions, EveryTypeAndOperationEqualsTheRankOrderReductionBitForBit) {
  for (const int world : {2, 3}) {
    on_gloo_threads(world, [world](Communicator& comm) {
      for (const auto dtype : kAllTypes) {
        for (const ReduceOp op : ops_of(dtype)) {
          const at::Tensor expected = reduced(world, 7 * world, dtype, op);
          const at::Tensor tensor = contribution(comm.rank(), 7 * world, dtype);
          const at::Tensor part = torch::empty({7}, dtype);
          comm.reduce_scatter(part, tensor, op).wait();
          EXPECT_TRUE(part.equal(expected.narrow(0, comm.rank() * 7, 7))) << dtype << name_of(op);
          const at::Tensor on_root = tensor.clone();
          comm.reduce(on_root, world - 1, op).wait();
          if (comm.rank() == world - 1) {
            EXPECT_TRUE(on_root.equal(expected)) << dtype << name_of(op);
          }
          comm.all_reduce(tensor, op).wait();
          EXPECT_TRUE(tensor.equal(expected)) << dtype << name_of(op);
        }
      }
    });
  }
}

TEST(GlooReductions, SizesAroundEveryThreshold) {
  // Elements of float32: nothing, fewer than ranks, around the small limit, one chunk, several windows of chunks.
  for (const int64_t count : {0, 1, 2, 4095, 4096, 4097, 100003, 262144 * 4 + 5}) {
    on_gloo_threads(3, [count](Communicator& comm) {
      const at::Tensor tensor = contribution(comm.rank(), count, at::kFloat);
      comm.all_reduce(tensor).wait();
      EXPECT_TRUE(tensor.equal(reduced(3, count, at::kFloat, ReduceOp::kSum))) << count;
      // In place: the output is the own part of the input, the other parts stay.
      const at::Tensor whole = contribution(comm.rank(), count * 3, at::kFloat);
      const at::Tensor before = whole.clone();
      comm.reduce_scatter(whole.narrow(0, comm.rank() * count, count), whole, ReduceOp::kAvg).wait();
      const at::Tensor expected = reduced(3, count * 3, at::kFloat, ReduceOp::kAvg);
      for (int r = 0; r < 3; ++r) {
        const auto part = [&](const at::Tensor& t) { return t.narrow(0, r * count, count); };
        EXPECT_TRUE(part(whole).equal(part(r == comm.rank() ? expected : before))) << count;
      }
      comm.all_gather(whole, whole.narrow(0, comm.rank() * count, count)).wait();
      EXPECT_TRUE(whole.equal(expected)) << count;
    });
  }
}

TEST(GlooCopies, MoveEveryType) {
  on_gloo_threads(3, [](Communicator& comm) {
    for (const auto dtype : kAllTypes) {
      const at::Tensor own = contribution(comm.rank(), 5, dtype);
      const at::Tensor all =
          torch::cat({contribution(0, 5, dtype), contribution(1, 5, dtype), contribution(2, 5, dtype)});
      const at::Tensor whole = torch::empty({15}, dtype);
      comm.all_gather(whole, own).wait();
      EXPECT_TRUE(whole.equal(all)) << dtype;
      const at::Tensor at_root = comm.rank() == 1 ? torch::empty({15}, dtype) : at::Tensor();
      comm.gather(at_root, own, 1).wait();
      if (comm.rank() == 1) {
        EXPECT_TRUE(at_root.equal(all)) << dtype;
      }
      const at::Tensor part = torch::empty({5}, dtype);
      comm.scatter(part, comm.rank() == 2 ? all : at::Tensor(), 2).wait();
      EXPECT_TRUE(part.equal(own)) << dtype;
      const at::Tensor copy = own.clone();
      comm.broadcast(copy, 1).wait();
      EXPECT_TRUE(copy.equal(contribution(1, 5, dtype))) << dtype;
    }
    for (const int64_t count : {4097, 300000}) {
      const at::Tensor large = contribution(comm.rank(), count, at::kFloat);
      comm.broadcast(large, 2).wait();
      EXPECT_TRUE(large.equal(contribution(2, count, at::kFloat)));
    }
  });
}

TEST(GlooCopies, AllToAllWithUnevenSplits) {
  on_gloo_threads(3, [](Communicator& comm) {
    const int own = comm.rank();
    // Rank i sends (i + j) % 3 rows to rank j, each with the value 10 i + j.
    std::vector<int64_t> to, from;
    std::vector<at::Tensor> sent, expected;
    for (int r = 0; r < 3; ++r) {
      to.push_back((own + r) % 3);
      from.push_back((r + own) % 3);
      sent.push_back(torch::full({to.back(), 4}, 10 * own + r, at::kInt));
      expected.push_back(torch::full({from.back(), 4}, 10 * r + own, at::kInt));
    }
    const at::Tensor output = torch::zeros({3, 4}, at::kInt);
    comm.all_to_all(output, torch::cat(sent), from, to).wait();
    EXPECT_TRUE(output.equal(torch::cat(expected)));
  });
}

TEST(GlooMessages, KeepTheirOrderAndMayBeReceivedByTag) {
  on_gloo_threads(2, [](Communicator& comm) {
    if (comm.rank() == 0) {
      std::vector<at::Tensor> sent;
      std::vector<Work> works;
      for (int i = 0; i < 6; ++i) {
        sent.push_back(torch::full({3}, static_cast<float>(i)));
        works.push_back(comm.isend(sent.back(), 1, i % 2));
      }
      for (const Work& work : works) work.wait();
    } else {
      for (const int i : {1, 0, 3, 2, 4, 5}) {
        const at::Tensor received = torch::zeros({3});
        comm.recv(received, 0, i % 2);
        EXPECT_EQ(received[0].item<float>(), i);
      }
    }
  });
}

TEST(GlooMessages, CompletionCanBePolledWhileAnEarlierReceiveIsOpen) {
  on_gloo_threads(2, [](Communicator& comm) {
    const int other = 1 - comm.rank();
    const at::Tensor late = torch::zeros({2}), soon = torch::zeros({2});
    const Work first = comm.irecv(late, other, 7);
    const Work second = comm.irecv(soon, other, 8);
    EXPECT_FALSE(first.is_completed());
    comm.isend(torch::ones({2}), other, 8).wait();
    while (!second.is_completed()) std::this_thread::yield();
    second.wait();
    EXPECT_EQ(soon.sum().item<float>(), 2);
    comm.isend(torch::full({2}, 3.0F), other, 7).wait();
    first.wait();
    EXPECT_EQ(late.sum().item<float>(), 6);
  });
}

TEST(GlooGroups, SubgroupsAreIndependentOfEachOther) {
  on_gloo_threads(4, [](Communicator& comm) {
    const auto even = comm.new_group({0, 2}, "even");
    const auto odd = comm.new_group({1, 3}, "odd");
    const auto& own = comm.rank() % 2 == 0 ? even : odd;
    EXPECT_EQ((comm.rank() % 2 == 0 ? odd : even), nullptr);
    ASSERT_NE(own, nullptr);
    EXPECT_EQ(own->rank(), comm.rank() / 2);
    const at::Tensor tensor = torch::full({10}, static_cast<float>(comm.rank()));
    own->all_reduce(tensor).wait();
    EXPECT_EQ(tensor[9].item<float>(), comm.rank() % 2 == 0 ? 2 : 4);
    comm.barrier();
  });
}

TEST(GlooErrors, BitwiseOnFloatingPointIsRefused) {
  on_gloo_threads(2, [](Communicator& comm) {
    try {
      comm.all_reduce(torch::ones({2}), ReduceOp::kBand, "layer.weight").wait();
      FAIL() << "expected UsageError";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("layer.weight"), ::testing::HasSubstr("band"),
                                                 ::testing::HasSubstr("integers")));
    }
  });
}

TEST(GlooErrors, ARankThatDoesNotComeIsNamedWithTheOperation) {
  on_gloo_threads(
      2,
      [](Communicator& comm) {
        if (comm.rank() == 1) return;
        try {
          comm.all_reduce(torch::ones({2}), ReduceOp::kSum, "layer.weight").wait();
          FAIL() << "expected CommError";
        } catch (const CommError& error) {
          EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("all_reduce 'layer.weight'"),
                                                     ::testing::HasSubstr("rank 0"), ::testing::HasSubstr("rank 1")));
        }
        EXPECT_THROW(comm.barrier(), CommError);  // and the group stays unusable
      },
      std::chrono::milliseconds(300));
}

TEST(GlooErrors, DifferentOperationsNeverTakeEachOthersBytes) {
  on_gloo_threads(
      2,
      [](Communicator& comm) {
        const at::Tensor tensor = torch::ones({comm.rank() == 0 ? 40 : 41});
        EXPECT_THROW(comm.all_reduce(tensor).wait(), CommError);
        EXPECT_EQ(tensor.sum().item<float>(), tensor.numel());
      },
      std::chrono::milliseconds(300));
}

}  // namespace
}  // namespace ds::comm
