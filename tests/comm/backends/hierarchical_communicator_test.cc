// Ranks as threads, on hosts that are only said to be several: the contract, and bits that do not depend on the rank.
#include "comm/backends/hierarchical_communicator.h"

#include "comm/collective.h"
#include "tests/comm/communicator_contract.h"
#include "tests/support/store_threads.h"

namespace ds::test {
namespace {

using Hosts = std::vector<std::vector<int>>;

void on_hosts(const Hosts& hosts, const std::function<void(comm::Communicator&)>& body) {
  int world = 0;
  for (const auto& ranks : hosts) world += static_cast<int>(ranks.size());
  ds::testing::on_store_threads(world, [&](const auto& store, int rank) {
    const auto communicator = comm::make_placed_communicator({.store = store,
                                                              .rank = rank,
                                                              .size = world,
                                                              .hosts = hosts,
                                                              .address = "127.0.0.1",
                                                              .timeout = std::chrono::seconds(60)});
    body(*communicator);
  });
}

// Sums of a hierarchy are made per host first: the contract's values of floating point agree with the flat reference
// only where hosts do not change the order, so reductions have tests of their own below.
class HierarchicalContract : public ::testing::TestWithParam<Hosts> {};

TEST_P(HierarchicalContract, ReductionsOfIntegersAreExactAndCopiesArrive) {
  const Hosts& hosts = GetParam();
  on_hosts(hosts, [](comm::Communicator& communicator) {
    const int world = communicator.size();
    const int rank = communicator.rank();
    for (const int64_t n : {0, 1, 7, 1000, 70001}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kBxor}) {
        const at::Tensor values = rank_values(n * world, at::kInt, rank);
        const at::Tensor wanted = reduced_values(world, n * world, at::kInt, op);
        at::Tensor tensor = values.clone();
        communicator.all_reduce(tensor, op).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted)) << n << name_of(op);
        tensor = values.narrow(0, 0, n).clone();  // does not divide by the ranks
        communicator.all_reduce(tensor, op).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted.narrow(0, 0, n))) << n << name_of(op);
        tensor = torch::empty({n}, at::kInt);
        communicator.reduce_scatter(tensor, values, op).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted.narrow(0, n * rank, n))) << n << name_of(op);
        for (int root = 0; root < world; ++root) {
          tensor = values.clone();
          communicator.reduce(tensor, root, op).wait();
          EXPECT_TRUE(rank != root || torch::equal(tensor, wanted)) << n << name_of(op);
        }
      }
      at::Tensor gathered = torch::zeros({n * world}, at::kInt);
      communicator.all_gather(gathered, rank_values(n, at::kInt, rank)).wait();
      for (int r = 0; r < world; ++r) {
        EXPECT_TRUE(torch::equal(gathered.narrow(0, r * n, n), rank_values(n, at::kInt, r)));
        at::Tensor tensor = rank_values(n, at::kInt, rank);
        communicator.broadcast(tensor, r).wait();
        EXPECT_TRUE(torch::equal(tensor, rank_values(n, at::kInt, r)));
      }
    }
  });
}

TEST_P(HierarchicalContract, SumsOfFloatingPointAreTheSameBitsOnAllRanksAndClose) {
  on_hosts(GetParam(), [](comm::Communicator& communicator) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      at::Tensor tensor = rank_values(5003, dtype, communicator.rank());
      communicator.all_reduce(tensor, ReduceOp::kAvg).wait();
      EXPECT_TRUE(torch::allclose(tensor.to(at::kFloat),
                                  reduced_values(communicator.size(), 5003, dtype, ReduceOp::kAvg).to(at::kFloat),
                                  dtype == at::kFloat ? 1e-5 : 2e-2, dtype == at::kFloat ? 1e-6 : 2e-2));
      at::Tensor all = torch::empty({5003 * communicator.size()}, dtype);
      communicator.all_gather(all, tensor).wait();
      for (int r = 0; r < communicator.size(); ++r) EXPECT_TRUE(torch::equal(all.narrow(0, r * 5003, 5003), tensor));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, HierarchicalContract,
                         ::testing::Values(Hosts{{0, 1}, {2, 3}}, Hosts{{0, 2}, {1, 3}}, Hosts{{0, 1, 2}, {3}},
                                           Hosts{{0, 1}, {2, 3}, {4, 5}}));

// min and max are exact in any order, so everything else of the contract holds as it stands.
std::vector<ContractCase> flat_cases() {
  const auto uneven = [](int, const std::function<void(comm::Communicator&)>& body) { on_hosts({{0, 1}, {2}}, body); };
  return {{"Uneven", 3, uneven}};
}

INSTANTIATE_TEST_SUITE_P(Hierarchical, CommunicatorContract, ::testing::ValuesIn(flat_cases()), contract_name);

TEST(Hierarchical, MessagesAndAllToAllCrossHosts) {
  on_hosts({{0, 1}, {2, 3}}, [](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    for (const int step : {1, 2, 3}) {
      at::Tensor got = torch::zeros({1001});
      const comm::Work sent = communicator.isend(rank_values(1001, at::kFloat, rank), (rank + step) % 4, step);
      communicator.recv(got, (rank + 4 - step) % 4, step);
      sent.wait();
      EXPECT_TRUE(torch::equal(got, rank_values(1001, at::kFloat, (rank + 4 - step) % 4)));
    }
    at::Tensor output = torch::zeros({4 * 3}, at::kLong);
    communicator.all_to_all(output, torch::full({4 * 3}, rank, at::kLong)).wait();
    EXPECT_TRUE(torch::equal(output, torch::arange(4).repeat_interleave(3)));
    communicator.barrier();
  });
}

TEST(Hierarchical, GroupsChooseAnewByWhereTheirRanksAre) {
  on_hosts({{0, 1}, {2, 3}}, [](comm::Communicator& communicator) {
    for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, {1, 2}, {0, 1, 3}, {0, 1, 2, 3}}) {
      const auto group = communicator.new_group(ranks, "group");
      if (!group) continue;
      at::Tensor tensor = torch::full({101}, static_cast<float>(communicator.rank()));
      group->all_reduce(tensor).wait();
      EXPECT_EQ(tensor[100].item<float>(), std::accumulate(ranks.begin(), ranks.end(), 0.0F));
    }
  });
}

}  // namespace
}  // namespace ds::test
