// The communicator that carries NCCL, on a backend that runs without a GPU: gloo's collectives between threads.
#include "comm/backends/c10d_communicator.h"

#include "comm/collective.h"
#include "comm/gloo/gloo_backend.h"
#include "tests/comm/communicator_contract.h"
#include "tests/support/store_threads.h"

namespace ds::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void on_c10d_threads(int world, const std::function<void(Communicator&)>& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  ds::testing::on_store_threads(world, [&](const auto& store, int rank) {
    const auto connect = [timeout](const auto& meeting, int own, int size, comm::C10dUse) {
      return comm::connect_gloo(meeting, own, size, {.timeout = timeout, .address = "127.0.0.1"});
    };
    const auto communicator =
        comm::make_c10d_communicator({.store = store, .rank = rank, .size = world, .connect = connect});
    body(*communicator);
  });
}

// Two ranks at most: with more, the backend adds in an order of its own, and not the reference's.
std::vector<ContractCase> cases() {
  const auto run = [](int size, const std::function<void(Communicator&)>& body) { on_c10d_threads(size, body); };
  return {{"Threads", 1, run, false}, {"Threads", 2, run, false}};
}

INSTANTIATE_TEST_SUITE_P(C10d, CommunicatorContract, ::testing::ValuesIn(cases()), contract_name);

TEST(C10dCommunicator, IntegersAreExactOnThreeRanks) {
  on_c10d_threads(3, [](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const at::ScalarType dtype : {at::kInt, at::kShort, at::kBool}) {
      for (const ReduceOp op : kEveryOp) {
        if (!reducible(dtype, op)) continue;
        const at::Tensor values = rank_values(21, dtype, rank);
        const at::Tensor wanted = reduced_values(3, 21, dtype, op);
        at::Tensor tensor = values.clone();
        communicator.all_reduce(tensor, op).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted)) << dtype << name_of(op);
        tensor = torch::empty({7}, dtype);
        communicator.reduce_scatter(tensor, values, op).wait();
        EXPECT_TRUE(torch::equal(tensor, wanted.narrow(0, 7 * rank, 7))) << dtype << name_of(op);
        tensor = values.clone();
        communicator.reduce(tensor, 2, op).wait();
        EXPECT_TRUE(rank != 2 || torch::equal(tensor, wanted)) << dtype << name_of(op);
      }
    }
  });
}

TEST(C10dCommunicator, GroupsOfThreeRanksAndUnevenAllToAll) {
  on_c10d_threads(3, [](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto pair = communicator.new_group({0, 2}, "pair");
    ASSERT_EQ(pair != nullptr, rank != 1);
    if (pair) {
      at::Tensor tensor = torch::full({5}, static_cast<float>(rank + 1));
      pair->all_reduce(tensor, ReduceOp::kAvg).wait();
      EXPECT_TRUE(torch::equal(tensor, torch::full({5}, 2.0F)));
    }
    // Rank s sends s + 1 rows to everybody.
    at::Tensor output = torch::zeros({6, 2});
    communicator.all_to_all(output, torch::full({3 * (rank + 1), 2}, static_cast<float>(rank)), {1, 2, 3}).wait();
    EXPECT_TRUE(torch::equal(output.select(1, 1), torch::tensor({0.0F, 1.0F, 1.0F, 2.0F, 2.0F, 2.0F})));
  });
}

TEST(C10dCommunicator, TensorsOfAnotherDeviceAreRefused) {
  on_c10d_threads(2, [](Communicator& communicator) {
    const at::Tensor elsewhere = torch::empty({4}, torch::TensorOptions(at::kMeta));
    EXPECT_THROW(communicator.all_reduce(elsewhere).wait(), UsageError);
  });
}

// Both send first, and a message does not wait for a collective that its sender comes to later.
TEST(C10dCommunicator, MessagesOfBothDirectionsAndCollectivesDoNotWaitForOneAnother) {
  on_c10d_threads(2, [](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    const at::Tensor own = torch::full({1 << 16}, communicator.rank() + 1.0F);
    at::Tensor got = torch::zeros({1 << 16});
    const comm::Work sent = communicator.isend(own, peer);
    const comm::Work received = communicator.irecv(got, peer);
    at::Tensor sum = own.clone();
    communicator.all_reduce(sum).wait();
    received.wait();
    sent.wait();
    EXPECT_TRUE(torch::equal(got, torch::full({1 << 16}, peer + 1.0F)));
    EXPECT_TRUE(torch::equal(sum, torch::full({1 << 16}, 3.0F)));
  });
}

TEST(C10dCommunicator, AGroupForMessagesRefusesCollectives) {
  on_c10d_threads(2, [](Communicator& communicator) {
    const auto group = communicator.new_group({0, 1}, "between", comm::GroupUse::kMessages);
    at::Tensor value = torch::full({3}, communicator.rank() + 5.0F);
    if (communicator.rank() == 0) {
      group->send(value, 1);
    } else {
      group->recv(value, 0);
    }
    EXPECT_TRUE(torch::equal(value, torch::full({3}, 5.0F)));
    try {
      group->all_reduce(value, ReduceOp::kSum, "layer.weight");
      FAIL() << "expected UsageError";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce 'layer.weight'"), HasSubstr("group 'between'"),
                                      HasSubstr("made for messages alone")));
    }
  });
}

TEST(C10dCommunicator, AnAbsentRankEndsTheWaitWithTheOperation) {
  on_c10d_threads(
      2,
      [](Communicator& communicator) {
        if (communicator.rank() == 1) return;
        try {
          communicator.all_reduce(torch::ones({2}), ReduceOp::kSum, "layer.weight").wait();
          FAIL() << "expected CommError";
        } catch (const CommError& error) {
          EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce 'layer.weight'"), HasSubstr("rank 0 of 2"),
                                          HasSubstr("group 'world'")));
        }
      },
      std::chrono::milliseconds(300));
}

}  // namespace
}  // namespace ds::test
