// What every Communicator must do. Include it in one file of a test binary and instantiate:
//
//   INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorContract, ::testing::ValuesIn(cases), contract_name);
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "core/check.h"
#include "dsengine/comm.h"
#include "tests/comm/reduction_reference.h"

namespace ds::test {

struct ContractCase {
  std::string name;
  int world;
  // Calls the body once per rank, on ranks that run at the same time, and throws when one of them does.
  std::function<void(int world, const std::function<void(comm::Communicator&)>& body)> run;
  // Messages may be received by tag in another order than they were sent in (NCCL: no).
  bool tags_reorder = true;
};

inline std::string contract_name(const ::testing::TestParamInfo<ContractCase>& info) {
  return info.param.name + std::to_string(info.param.world);
}

class CommunicatorContract : public ::testing::TestWithParam<ContractCase> {
 protected:
  int world() const { return GetParam().world; }
  void on_ranks(const std::function<void(comm::Communicator&)>& body) const { GetParam().run(world(), body); }
  // Nothing, one element, odd numbers, less and more than an implementation's chunks.
  static std::vector<int64_t> sizes() { return {0, 1, 7, 1000, 65537, 150001}; }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorContract);

using comm::Communicator;
using comm::ReduceOp;

inline constexpr ReduceOp kEveryOp[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct, ReduceOp::kMin,
                                        ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor,     ReduceOp::kBxor};

TEST_P(CommunicatorContract, AllReduceEveryTypeAndOperation) {
  on_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : communicated_types()) {
      for (const ReduceOp op : kEveryOp) {
        at::Tensor tensor = rank_values(3001, dtype, communicator.rank());
        if (reducible(dtype, op)) {
          communicator.all_reduce(tensor, op).wait();
          EXPECT_TRUE(torch::equal(tensor, reduced_values(world(), 3001, dtype, op))) << dtype << " " << name_of(op);
        } else if (world() > 1) {
          EXPECT_THROW(communicator.all_reduce(tensor, op).wait(), UsageError) << dtype << " " << name_of(op);
        }
      }
    }
  });
}

TEST_P(CommunicatorContract, ReductionsOfEverySize) {
  on_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t n : sizes()) {
        SCOPED_TRACE(::testing::Message() << n << " " << dtype << " rank " << communicator.rank());
        const at::Tensor values = rank_values(n * world(), dtype, communicator.rank());
        const at::Tensor wanted = reduced_values(world(), n * world(), dtype, ReduceOp::kAvg);
        const at::Tensor own_part = wanted.narrow(0, n * communicator.rank(), n);

        at::Tensor tensor = values.clone();
        communicator.all_reduce(tensor, ReduceOp::kAvg).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted));

        at::Tensor part = torch::empty({n}, dtype);
        communicator.reduce_scatter(part, values, ReduceOp::kAvg).wait();
        EXPECT_TRUE(torch::equal(part, own_part));

        tensor = values.clone();
        communicator.reduce_scatter(tensor.narrow(0, n * communicator.rank(), n), tensor, ReduceOp::kAvg).wait();
        EXPECT_TRUE(torch::equal(tensor.narrow(0, n * communicator.rank(), n), own_part)) << "in place";
        EXPECT_TRUE(
            torch::equal(tensor.narrow(0, 0, n * communicator.rank()), values.narrow(0, 0, n * communicator.rank())))
            << "the other parts stay";

        for (int root = 0; root < world(); ++root) {
          tensor = values.clone();
          communicator.reduce(tensor, root, ReduceOp::kAvg).wait();
          EXPECT_TRUE(communicator.rank() != root || torch::equal(tensor, wanted)) << "root " << root;
        }
      }
    }
  });
}

TEST_P(CommunicatorContract, CopiesOfEverySize) {
  on_ranks([&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const int64_t n : sizes()) {
      SCOPED_TRACE(::testing::Message() << n << " elements, rank " << rank);
      std::vector<at::Tensor> parts;
      for (int r = 0; r < world(); ++r) parts.push_back(rank_values(n, at::kInt, r));
      const at::Tensor all = torch::cat(parts);

      at::Tensor output = torch::zeros({world() * n}, at::kInt);
      communicator.all_gather(output, parts[rank]).wait();
      EXPECT_TRUE(torch::equal(output, all));

      output = torch::zeros({world() * n}, at::kInt);
      output.narrow(0, rank * n, n).copy_(parts[rank]);
      communicator.all_gather(output, output.narrow(0, rank * n, n)).wait();
      EXPECT_TRUE(torch::equal(output, all)) << "in place";

      for (int root = 0; root < world(); ++root) {
        at::Tensor tensor = parts[rank].clone();
        communicator.broadcast(tensor, root).wait();
        EXPECT_TRUE(torch::equal(tensor, parts[root]));

        output = rank == root ? torch::zeros({world() * n}, at::kInt) : at::Tensor();
        communicator.gather(output, parts[rank], root).wait();
        EXPECT_TRUE(rank != root || torch::equal(output, all));

        tensor = torch::zeros({n}, at::kInt);
        communicator.scatter(tensor, rank == root ? all : at::Tensor(), root).wait();
        EXPECT_TRUE(torch::equal(tensor, parts[rank]));
      }
    }
  });
}

TEST_P(CommunicatorContract, EveryTypeIsCopied) {
  on_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : communicated_types()) {
      at::Tensor output = torch::zeros({world() * 5}, dtype);
      communicator.all_gather(output, rank_values(5, dtype, communicator.rank())).wait();
      for (int r = 0; r < world(); ++r) {
        EXPECT_TRUE(torch::equal(output.narrow(0, r * 5, 5), rank_values(5, dtype, r))) << dtype;
      }
    }
  });
}

TEST_P(CommunicatorContract, AllToAllEvenAndUneven) {
  on_ranks([&](Communicator& communicator) {
    const int rank = communicator.rank();
    // Rank s sends (s + 2 d) % 4 times `scale` rows to rank d: some parts are empty, with the large scale some need
    // several chunks.
    for (const int64_t scale : {1, 30011}) {
      std::vector<int64_t> input_splits;
      std::vector<int64_t> output_splits;
      std::vector<at::Tensor> wanted;
      for (int r = 0; r < world(); ++r) {
        input_splits.push_back((rank + 2 * r) % 4 * scale);
        output_splits.push_back((r + 2 * rank) % 4 * scale);
        wanted.push_back(rank_values(output_splits.back() * 3, at::kFloat, r, rank + 1).view({-1, 3}));
      }
      std::vector<at::Tensor> parts;
      for (int r = 0; r < world(); ++r) {
        parts.push_back(rank_values(input_splits[r] * 3, at::kFloat, rank, r + 1).view({-1, 3}));
      }
      at::Tensor output = torch::zeros({std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0}), 3});
      communicator.all_to_all(output, torch::cat(parts), output_splits, input_splits).wait();
      EXPECT_TRUE(torch::equal(output, torch::cat(wanted))) << "rank " << rank << " scale " << scale;
    }
    at::Tensor output = torch::zeros({world() * 3}, at::kLong);
    communicator.all_to_all(output, torch::full({world() * 3}, rank, at::kLong)).wait();
    EXPECT_TRUE(torch::equal(output, torch::arange(world()).repeat_interleave(3)));
  });
}

TEST_P(CommunicatorContract, ManyOperationsUnderWayAtOnce) {
  constexpr int kOperations = 24;
  on_ranks([&](Communicator& communicator) {
    std::vector<at::Tensor> sums;
    std::vector<at::Tensor> gathered;
    std::vector<comm::Work> works;
    for (int i = 0; i < kOperations; ++i) {
      const int64_t n = 1 + i * i * 1000;
      sums.push_back(rank_values(n, at::kFloat, communicator.rank(), i));
      works.push_back(communicator.all_reduce(sums.back()));
      gathered.push_back(torch::zeros({world() * (i + 1)}));
      works.push_back(communicator.all_gather(gathered.back(), torch::full({i + 1}, float(communicator.rank()))));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) {
      work->wait();
      EXPECT_TRUE(work->is_completed());
    }
    for (int i = 0; i < kOperations; ++i) {
      EXPECT_TRUE(torch::equal(sums[i], reduced_values(world(), 1 + i * i * 1000, at::kFloat, ReduceOp::kSum, i)));
      EXPECT_TRUE(torch::equal(gathered[i], torch::arange(world()).to(at::kFloat).repeat_interleave(i + 1)));
    }
  });
}

TEST_P(CommunicatorContract, AllReduceEqualsReduceScatterAndAllGather) {
  on_ranks([&](Communicator& communicator) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
      const int64_t n = 100003;
      at::Tensor one = rank_values(n * world(), dtype, communicator.rank());
      at::Tensor part = torch::empty({n}, dtype);
      communicator.reduce_scatter(part, one).wait();
      at::Tensor two = torch::empty_like(one);
      communicator.all_gather(two, part).wait();
      communicator.all_reduce(one).wait();
      EXPECT_TRUE(torch::equal(one, two));
    }
  });
}

TEST_P(CommunicatorContract, MessagesAroundTheRing) {
  on_ranks([&](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % world();
    const int previous = (communicator.rank() + world() - 1) % world();
    for (const int64_t n : {0, 1, 1001, 1500007}) {
      at::Tensor got = torch::zeros({n});
      const comm::Work sent = communicator.isend(rank_values(n, at::kFloat, communicator.rank()), next);
      communicator.recv(got, previous);
      sent.wait();
      EXPECT_TRUE(torch::equal(got, rank_values(n, at::kFloat, previous)));
    }
  });
}

TEST_P(CommunicatorContract, MessagesKeepTheirOrderPerTag) {
  on_ranks([&](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % world();
    const int previous = (communicator.rank() + world() - 1) % world();
    std::vector<comm::Work> works;
    for (int i = 0; i < 6; ++i) works.push_back(communicator.isend(torch::full({50001}, 10.0F + i), next, i % 2));
    const std::vector<int> other_tag_first{1, 3, 5, 0, 2, 4};
    const std::vector<int> as_sent{0, 1, 2, 3, 4, 5};
    for (const int i : GetParam().tags_reorder ? other_tag_first : as_sent) {
      at::Tensor got = torch::zeros({50001});
      communicator.recv(got, previous, i % 2);
      EXPECT_TRUE(torch::equal(got, torch::full({50001}, 10.0F + i)));
    }
    for (const comm::Work& work : works) work.wait();
  });
}

TEST_P(CommunicatorContract, AnUnansweredSendBlocksNothing) {
  on_ranks([&](Communicator& communicator) {
    const int next = (communicator.rank() + 1) % world();
    const int previous = (communicator.rank() + world() - 1) % world();
    const comm::Work sent = communicator.isend(torch::full({3000000}, 7.0F), next, 5);
    at::Tensor sum = torch::ones({10});
    communicator.all_reduce(sum).wait();
    EXPECT_TRUE(torch::equal(sum, torch::full({10}, float(world()))));
    at::Tensor got = torch::zeros({3000000});
    communicator.recv(got, previous, 5);
    sent.wait();
    EXPECT_TRUE(torch::equal(got, torch::full({3000000}, 7.0F)));
  });
}

TEST_P(CommunicatorContract, NewGroupsWorkBesideTheirParent) {
  on_ranks([&](Communicator& communicator) {
    std::vector<int> even;
    std::vector<int> odd;
    for (int r = 0; r < world(); ++r) (r % 2 == 0 ? even : odd).push_back(r);
    const auto evens = communicator.new_group(even, "even");
    const auto odds = odd.empty() ? nullptr : communicator.new_group(odd, "odd");
    const bool is_even = communicator.rank() % 2 == 0;
    EXPECT_EQ(evens != nullptr, is_even);
    EXPECT_EQ(odds != nullptr, !is_even);
    const auto& mine = is_even ? evens : odds;
    ASSERT_NE(mine, nullptr);
    EXPECT_EQ(mine->rank(), communicator.rank() / 2);
    EXPECT_EQ(mine->name(), is_even ? "even" : "odd");
    at::Tensor inner = torch::full({1000}, float(communicator.rank()));
    at::Tensor outer = torch::ones({1000});
    const comm::Work a = mine->all_reduce(inner);
    const comm::Work b = communicator.all_reduce(outer);
    b.wait();
    a.wait();
    const std::vector<int>& members = is_even ? even : odd;
    EXPECT_TRUE(torch::equal(inner, torch::full({1000}, std::accumulate(members.begin(), members.end(), 0.0F))));
    EXPECT_TRUE(torch::equal(outer, torch::full({1000}, float(world()))));
    EXPECT_EQ(communicator.counters().calls[static_cast<size_t>(comm::CollectiveKind::kBroadcast)], 0)
        << "making groups is not counted";
  });
}

TEST_P(CommunicatorContract, CountsTheBytesSent) {
  on_ranks([&](Communicator& communicator) {
    const int64_t others = world() - 1;
    at::Tensor whole = torch::ones({world() * 100});
    at::Tensor part = torch::ones({100});
    communicator.all_reduce(whole).wait();
    communicator.reduce_scatter(part, whole).wait();
    communicator.all_gather(whole, part).wait();
    communicator.barrier();
    EXPECT_EQ(communicator.counters().total_bytes_sent(), (2 + 1 + 1) * 400 * others);
    communicator.reset_counters();
    EXPECT_EQ(communicator.counters().total_bytes_sent(), 0);
  });
}

TEST_P(CommunicatorContract, BarriersHoldBackTheEarly) {
  std::atomic<int> arrived{0};
  on_ranks([&](Communicator& communicator) {
    for (int round = 1; round <= 50; ++round) {
      arrived.fetch_add(1);
      communicator.barrier();
      EXPECT_GE(arrived.load(), round * world());
      communicator.barrier();
    }
  });
}

TEST_P(CommunicatorContract, WrongCallsAreRefused) {
  on_ranks([&](Communicator& communicator) {
    EXPECT_THROW(communicator.broadcast(torch::ones({2}), world()), UsageError);
    EXPECT_THROW(communicator.all_reduce(torch::ones({4, 4}).t().narrow(0, 0, 2)), UsageError);
    EXPECT_THROW(communicator.all_gather(torch::ones({world() + 1}), torch::ones({1})), UsageError);
    EXPECT_THROW(communicator.new_group({world()}, "outside"), UsageError);
    EXPECT_THROW(communicator.new_group({}, "empty"), UsageError);
  });
}

}  // namespace ds::test
