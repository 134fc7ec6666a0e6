// What the shared-memory communicator does when ranks disagree, stay away or leave.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "comm/shared_memory/shared_memory_layout.h"
#include "comm/shared_memory/shared_region.h"
#include "core/check.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {
namespace {

using comm::Communicator;
using comm::ReduceOp;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The CommError that `body` throws.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a CommError";
  return {};
}

// Both ranks of two must name both operations.
void expect_mismatch(const std::function<void(Communicator&)>& first, const std::function<void(Communicator&)>& second,
                     const std::string& first_text, const std::string& second_text) {
  run_ranks(2, [&](Communicator& communicator) {
    const std::string error = error_of([&] { communicator.rank() == 0 ? first(communicator) : second(communicator); });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0"), HasSubstr(first_text), HasSubstr("rank 1"), HasSubstr(second_text)))
        << "on rank " << communicator.rank();
  });
}

TEST(SharedMemoryMismatch, KindSizeTypeOperationRootAndLabelAreCompared) {
  const auto all_reduce = [](Communicator& communicator) {
    communicator.all_reduce(torch::ones({12}), ReduceOp::kSum, "h.0.weight").wait();
  };
  expect_mismatch(
      all_reduce, [](Communicator& c) { c.barrier("end of step"); }, "all_reduce sum of 12 Float 'h.0.weight'",
      "barrier 'end of step'");
  expect_mismatch(
      all_reduce, [](Communicator& c) { c.all_reduce(torch::ones({13}), ReduceOp::kSum, "h.0.weight").wait(); },
      "of 12 Float", "of 13 Float");
  expect_mismatch(
      all_reduce, [](Communicator& c) { c.all_reduce(torch::ones({12}, at::kDouble), ReduceOp::kSum, "x").wait(); },
      "of 12 Float 'h.0.weight'", "of 12 Double 'x'");
  expect_mismatch(
      all_reduce, [](Communicator& c) { c.all_reduce(torch::ones({12}), ReduceOp::kMax).wait(); }, "all_reduce sum",
      "all_reduce max");
  expect_mismatch([](Communicator& c) { c.broadcast(torch::ones({1}), 0).wait(); },
                  [](Communicator& c) { c.broadcast(torch::ones({1}), 1).wait(); }, "root 0", "root 1");
  // The same sizes, but not the same tensor.
  expect_mismatch(
      all_reduce, [](Communicator& c) { c.all_reduce(torch::ones({12}), ReduceOp::kSum, "h.1.weight").wait(); },
      "'h.0.weight'", "'h.1.weight'");
  // Different numbers of chunks.
  expect_mismatch([](Communicator& c) { c.all_reduce(torch::ones({1})).wait(); },
                  [](Communicator& c) { c.all_reduce(torch::ones({10000000})).wait(); }, "of 1 Float",
                  "of 10000000 Float");
}

TEST(SharedMemoryMismatch, TheCallOfEachRankIsNamed) {
  run_ranks(2, [](Communicator& communicator) {
    const bool saves = communicator.rank() == 0;
    communicator.note_phase(saves ? "save_checkpoint" : "the program (data, forward)", 2);
    const std::string error = error_of(
        [&] { communicator.all_reduce(torch::ones({4}), ReduceOp::kSum, saves ? "length of a text" : "mine").wait(); });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 is in save_checkpoint(), rank 1 in the program (data, forward); rank "),
                             HasSubstr("'length of a text' (#1, step 2) of save_checkpoint()"),
                             HasSubstr("'mine' (#1, step 2)")));
  });
}

TEST(SharedMemoryMismatch, NewGroupsOfDifferentRanks) {
  expect_mismatch([](Communicator& c) { c.new_group({0}, "a"); },
                  [](Communicator& c) {
                    c.new_group({0, 1}, "a");
                  },
                  "new_group a of ranks 0'", "new_group a of ranks 0,1'");
}

TEST(SharedMemoryMismatch, AllToAllSplits) {
  run_ranks(2, [&](Communicator& communicator) {
    // Rank 0 sends one row to rank 1, which expects two.
    const bool first = communicator.rank() == 0;
    const at::Tensor input = torch::ones({first ? 2 : 3, 1});
    const at::Tensor output = torch::ones({first ? 2 : 4, 1});
    const std::string error = error_of([&] {
      communicator
          .all_to_all(output, input, first ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{2, 2},
                      first ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{1, 2})
          .wait();
    });
    EXPECT_THAT(error, HasSubstr("expected 8 bytes from rank 0, which sends 4")) << "on rank " << communicator.rank();
  });
}

TEST(SharedMemoryMismatch, MessageSizesAndTypes) {
  for (const at::Tensor& expected : {torch::zeros({3}), torch::zeros({2}, at::kInt)}) {
    run_ranks(2, [&](Communicator& communicator) {
      if (communicator.rank() == 0) {
        communicator.isend(torch::ones({2}), 1, 4, "activation").wait();
      } else {
        EXPECT_THAT(error_of([&] { communicator.irecv(expected.clone(), 0, 4, "input").wait(); }),
                    AllOf(HasSubstr("'input'"), HasSubstr("tag 4"), HasSubstr("rank 0 sends 2 Float 'activation'")));
      }
    });
  }
}

TEST(SharedMemoryTimeout, NamesTheMissingRankAndWhatItDidLast) {
  const comm::ThreadGroup group(3, std::chrono::milliseconds(300));
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(group.communicator(r));
  std::vector<at::Tensor> tensors(3, torch::Tensor());
  std::vector<comm::Work> works;
  for (int r = 0; r < 3; ++r) {
    tensors[r] = torch::ones({5});
    works.push_back(ranks[r]->all_reduce(tensors[r], ReduceOp::kSum, "h.0"));
  }
  for (const comm::Work& work : works) work.wait();
  const comm::Work a = ranks[0]->all_reduce(tensors[0], ReduceOp::kSum, "h.1");
  const comm::Work b = ranks[2]->all_reduce(tensors[2], ReduceOp::kSum, "h.1");
  for (const comm::Work& work : {a, b}) {
    EXPECT_THAT(error_of([&] { work.wait(); }),
                AllOf(HasSubstr("all_reduce sum of 5 Float 'h.1' (#2)"), HasSubstr("timed out after 0.3 s"),
                      HasSubstr("rank 1 (last began all_reduce sum of 5 Float 'h.0' (#1))")));
  }
  EXPECT_THAT(error_of([&] { ranks[0]->barrier("later"); }),
              AllOf(HasSubstr("later"), HasSubstr("failed before"), HasSubstr("'h.1'")))
      << "the first error is the cause of all later ones";
  EXPECT_THAT(error_of([&] { ranks[1]->all_reduce(tensors[1]).wait(); }), HasSubstr("failed before"))
      << "the rank that comes late hears it, too";
}

TEST(SharedMemoryTimeout, AReceiveWithoutASender) {
  const comm::ThreadGroup group(2, std::chrono::milliseconds(300));
  const auto waiting = group.communicator(0);
  const auto idle = group.communicator(1);
  const at::Tensor tensor = torch::zeros({2});
  EXPECT_THAT(error_of([&] { waiting->irecv(tensor, 1, 3, "activation").wait(); }),
              AllOf(HasSubstr("recv of 2 Float 'activation' from rank 1, tag 3"), HasSubstr("timed out after 0.3 s"),
                    HasSubstr("rank 1 (last began nothing yet)")));
  EXPECT_THAT(error_of([&] { waiting->recv(tensor, 1); }), HasSubstr("failed before"));
  EXPECT_THAT(error_of([&] { waiting->barrier(); }), HasSubstr("failed before"));
  EXPECT_THAT(error_of([&] { idle->barrier(); }), HasSubstr("rank 0 failed before"));
}

TEST(SharedMemoryLeaving, OthersHearAtOnceThatARankHasLeft) {
  const auto start = std::chrono::steady_clock::now();
  run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 1) return;
    EXPECT_THAT(error_of([&] { communicator.barrier(); }), HasSubstr("rank 1 has destroyed its communicator"));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << "not after the time limit of 30 s";
}

TEST(SharedMemoryLeaving, OperationsUnderWayAreFinishedFirst) {
  at::Tensor sums[2];
  at::Tensor got = torch::zeros({100000});
  run_ranks(2, [&](Communicator& communicator) {
    at::Tensor& sum = sums[communicator.rank()];
    sum = torch::ones({1000000});
    const comm::Work work = communicator.all_reduce(sum);
    if (communicator.rank() == 0) {
      communicator.isend(torch::ones({100000}), 1);  // neither is waited for
      return;
    }
    work.wait();
    communicator.recv(got, 0);
  });
  EXPECT_TRUE(torch::equal(sums[0], torch::full({1000000}, 2.0F)));
  EXPECT_TRUE(torch::equal(sums[1], torch::full({1000000}, 2.0F)));
  EXPECT_TRUE(torch::equal(got, torch::ones({100000})));
}

TEST(SharedMemoryLeaving, AnErrorOnOneRankIsReportedAsThatOfTheRank) {
  try {
    run_ranks(3, [](Communicator& communicator) {
      if (communicator.rank() == 1) throw std::runtime_error("the disk is full");
      EXPECT_THROW(communicator.barrier(), CommError);
    });
    FAIL() << "did not throw";
  } catch (const RankFailure& failure) {
    EXPECT_EQ(failure.rank(), 1);
    EXPECT_STREQ(failure.what(), "rank 1: the disk is full");
  }
}

TEST(SharedMemoryUsage, TensorsOfOtherDevicesAreRefused) {
  run_ranks(2, [](Communicator& communicator) {
    try {
      communicator.all_reduce(torch::ones({2}, at::kMeta), ReduceOp::kSum, "h.0");
      ADD_FAILURE() << "did not throw";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce 'h.0'"), HasSubstr("expected a CPU tensor"),
                                      HasSubstr("on meta"), HasSubstr("gloo or nccl")));
    }
    EXPECT_THROW(communicator.all_reduce(torch::ones({2}, at::kComplexFloat)), UsageError);
    communicator.barrier();  // still usable
  });
}

TEST(SharedRegion, MoreThanThereIsRoomForIsAnErrorWithSizes) {
  const size_t bytes = size_t{1} << 46;
  EXPECT_THAT(error_of([&] { comm::SharedRegion::create("/dsengine-test-too-large", bytes); }),
              AllOf(HasSubstr(std::to_string(bytes)), HasSubstr("/dev/shm")));
  EXPECT_THAT(error_of([] { comm::SharedRegion::attach("/dsengine-test-too-large", 4096); }),
              HasSubstr("No such file or directory"))
      << "nothing is left behind";
}

// Of a process that was killed before it could take the name away, an hour ago.
TEST(SharedRegion, WhatIsLeftOverIsRemovedOnce) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  const auto make = [](pid_t process, const char* rest, std::chrono::hours age) {
    const std::filesystem::path file = cat("/dev/shm/dsengine-left-", process, rest);
    std::ofstream(file).close();
    std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - age);
    return file;
  };
  const auto left = make(gone, "-1.0", std::chrono::hours(2));
  const auto young = make(gone, "-2", std::chrono::hours(0));
  const auto used = make(getpid(), "-3", std::chrono::hours(2));
  const auto other = make(gone, "", std::chrono::hours(2));
  comm::SharedRegion::remove_left_over("/dsengine-left-");
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_FALSE(std::filesystem::exists(other));
  EXPECT_TRUE(std::filesystem::remove(young));
  EXPECT_TRUE(std::filesystem::remove(used));
}

TEST(SharedRegion, SizesMustAgree) {
  const auto region = comm::SharedRegion::create("/dsengine-test-sizes", 8192);
  EXPECT_THAT(error_of([] { comm::SharedRegion::attach("/dsengine-test-sizes", 4096); }),
              HasSubstr("expected 4096 bytes, found 8192"));
  const auto again = comm::SharedRegion::attach("/dsengine-test-sizes", 8192);
  comm::SharedRegion::remove_name("/dsengine-test-sizes");
  region->data()[5000] = std::byte{7};
  EXPECT_EQ(again->data()[5000], std::byte{7}) << "mappings outlive the name";
}

}  // namespace
}  // namespace ds::test
