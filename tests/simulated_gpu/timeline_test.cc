// Streams, events and memory of the simulated GPU (tests/simulated_gpu/timeline.h).
#include "tests/simulated_gpu/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ds::simulated_gpu {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr size_t kBytes = 100;
std::array<char, 2 * kBytes> host_bytes;
const auto kMemory = reinterpret_cast<uintptr_t>(host_bytes.data());

Access reads(uintptr_t begin, uintptr_t end) { return {kMemory + begin, kMemory + end, false}; }
Access writes(uintptr_t begin, uintptr_t end) { return {kMemory + begin, kMemory + end, true}; }

class TimelineTest : public testing::Test {
 protected:
  Point give(size_t stream, const char* name, const std::vector<Access>& accesses = {}) {
    return timeline_.enqueue(stream, name, accesses, [this, name] { ran_.emplace_back(name); });
  }
  // Memory of the first stream, which the second comes after.
  void add_memory(Where where = Where::kDevice) {
    timeline_.add_memory(kMemory, kBytes, where, compute_);
    timeline_.block(copies_, timeline_.now(compute_));
  }
  bool released_by_free() {
    timeline_.free_memory(kMemory, [this] { released_ = true; });
    return released_;
  }

  Timeline timeline_;
  size_t compute_ = timeline_.stream(0, 0);
  size_t copies_ = timeline_.stream(0, 7);
  std::vector<std::string> ran_;
  bool released_ = false;
};

TEST_F(TimelineTest, NumbersStreamsByDeviceAndId) {
  EXPECT_EQ(timeline_.stream(0, 0), compute_);
  EXPECT_EQ(timeline_.stream(0, 7), copies_);
  EXPECT_NE(timeline_.stream(1, 7), copies_);
}

TEST_F(TimelineTest, WhatNothingWaitsForDoesNotRun) {
  const Point copy = give(copies_, "copy");
  timeline_.wait(give(compute_, "kernel"), "test");
  EXPECT_THAT(ran_, ElementsAre("kernel"));
  EXPECT_FALSE(timeline_.reached(copy));
  timeline_.wait(copy, "test");
  EXPECT_THAT(ran_, ElementsAre("kernel", "copy"));
  EXPECT_TRUE(timeline_.reached(copy));
}

TEST_F(TimelineTest, CountsWhatTheHostWaitsFor) {
  const Point first = give(compute_, "kernel");
  give(compute_, "kernel");
  timeline_.wait(first, "a copy");
  timeline_.wait(timeline_.now(compute_), "a copy");
  timeline_.wait(timeline_.now(compute_), "a copy");
  timeline_.run_until(give(compute_, "kernel"));
  using Waits = std::map<std::string, int64_t>;
  EXPECT_EQ(timeline_.take_waits(), (Waits{{"a copy", 1}, {"a copy (nothing behind it)", 2}}));
  EXPECT_EQ(timeline_.take_waits(), Waits());
}

TEST_F(TimelineTest, TasksOfAStreamRunInOrderUpToThePoint) {
  give(compute_, "first");
  const Point second = give(compute_, "second");
  const Point third = give(compute_, "third");
  timeline_.run_until(second);
  EXPECT_THAT(ran_, ElementsAre("first", "second"));
  EXPECT_FALSE(timeline_.reached(third));
  timeline_.wait_for_all();
  EXPECT_THAT(ran_, ElementsAre("first", "second", "third"));
}

TEST_F(TimelineTest, EventsOrderStreamsBothWays) {
  timeline_.block(copies_, give(compute_, "first"));
  give(compute_, "beside");
  timeline_.block(compute_, give(copies_, "second"));
  timeline_.wait(give(compute_, "third"), "test");
  EXPECT_THAT(ran_, ElementsAre("first", "beside", "second", "third"));
}

// The stream that is waited for goes no further than the event, and does not wait for the other.
TEST_F(TimelineTest, EventsAreOfThePastOfTheirStream) {
  timeline_.block(copies_, give(compute_, "before"));
  give(compute_, "after");
  timeline_.run_until(give(copies_, "copy"));
  EXPECT_THAT(ran_, ElementsAre("before", "copy"));
  give(copies_, "later copy");
  timeline_.wait(timeline_.now(compute_), "test");
  EXPECT_THAT(ran_, ElementsAre("before", "copy", "after"));
}

TEST_F(TimelineTest, ReportsAReadAfterAWrite) {
  add_memory();
  give(compute_, "fill", {writes(0, 60)});
  give(copies_, "copy", {reads(50, 100)});
  EXPECT_THAT(timeline_.take_reports(),
              ElementsAre("copy, which reads bytes 50 to 100 on stream 7 of cuda:0 is not ordered after fill, which "
                          "writes bytes 0 to 60 on the default stream of cuda:0"));
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, ReportsAWriteAfterARead) {
  add_memory();
  give(copies_, "copy", {reads(0, 100)});
  give(compute_, "fill", {writes(0, 8)});
  EXPECT_THAT(timeline_.take_reports(),
              ElementsAre("fill, which writes bytes 0 to 8 on the default stream of cuda:0 is not ordered after copy, "
                          "which reads bytes 0 to 100 on stream 7 of cuda:0"));
}

TEST_F(TimelineTest, ReportsAWriteAfterAWrite) {
  add_memory();
  give(compute_, "fill", {writes(0, 8)});
  give(copies_, "copy", {writes(4, 8)});
  EXPECT_EQ(timeline_.take_reports().size(), 1U);
}

// What ran early by chance is no less wrong.
TEST_F(TimelineTest, ReportsWhatHappenedInOrderUnordered) {
  add_memory();
  timeline_.run_until(give(compute_, "fill", {writes(0, 8)}));
  timeline_.run_until(give(copies_, "copy", {reads(0, 8)}));
  EXPECT_THAT(ran_, ElementsAre("fill", "copy"));
  EXPECT_EQ(timeline_.take_reports().size(), 1U);
}

TEST_F(TimelineTest, ReportsUseBeforeTheMemoryIsThere) {
  give(compute_, "earlier user of this memory");
  timeline_.add_memory(kMemory, kBytes, Where::kDevice, compute_);
  give(copies_, "copy", {writes(0, 8)});
  EXPECT_THAT(
      timeline_.take_reports(),
      ElementsAre("copy, which writes bytes 0 to 8 on stream 7 of cuda:0 is not ordered after allocation, which "
                  "writes bytes 0 to 100 on the default stream of cuda:0"));
}

TEST_F(TimelineTest, EventsOrderAccesses) {
  add_memory();
  timeline_.block(copies_, give(compute_, "fill", {writes(0, 100)}));
  timeline_.block(compute_, give(copies_, "copy", {reads(0, 100)}));
  give(compute_, "fill again", {writes(0, 100)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, EventsOrderAccessesThroughAThirdStream) {
  add_memory();
  const size_t between = timeline_.stream(0, 8);
  timeline_.block(between, give(compute_, "fill", {writes(0, 100)}));
  timeline_.block(copies_, timeline_.now(between));
  give(copies_, "copy", {reads(0, 100)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, AnEventBeforeAnAccessDoesNotOrderIt) {
  add_memory();
  const Point before = timeline_.now(compute_);
  give(compute_, "fill", {writes(0, 100)});
  timeline_.block(copies_, before);
  give(copies_, "copy", {reads(0, 100)});
  EXPECT_EQ(timeline_.take_reports().size(), 1U);
}

TEST_F(TimelineTest, WaitsOfTheHostOrderAccesses) {
  add_memory();
  timeline_.wait(give(compute_, "fill", {writes(0, 100)}), "test");
  give(copies_, "copy", {reads(0, 100)});
  timeline_.wait_for_all();
  give(compute_, "fill again", {writes(0, 100)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, OtherBytesOtherMemoryAndReadsAreNoConflict) {
  add_memory();
  timeline_.add_memory(kMemory + kBytes, kBytes, Where::kDevice, copies_);
  give(compute_, "left half", {writes(0, 50), reads(60, 70)});
  give(copies_, "right half", {writes(50, 60), reads(60, 70)});
  give(copies_, "other memory", {writes(100, 200)});
  give(copies_, "nothing", {writes(10, 10)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

// Who comes after a read may still come too early for the write before it.
TEST_F(TimelineTest, RemembersWritesThatWereRead) {
  add_memory();
  timeline_.block(copies_, give(compute_, "fill", {writes(0, 8)}));
  give(copies_, "ordered", {reads(0, 100)});
  give(timeline_.stream(0, 8), "third", {reads(0, 8)});
  EXPECT_THAT(timeline_.take_reports(), Contains(testing::HasSubstr("is not ordered after fill")));
}

// A write makes it forget no more than what it covers.
TEST_F(TimelineTest, RemembersWhatIsNotWrittenOver) {
  add_memory();
  timeline_.block(copies_, give(compute_, "fill", {writes(0, 100)}));
  give(compute_, "half", {writes(0, 50)});
  give(copies_, "ordered", {reads(50, 100)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  give(timeline_.stream(0, 8), "third", {reads(50, 100)});
  EXPECT_THAT(timeline_.take_reports(), Contains(testing::HasSubstr("is not ordered after fill")));
}

TEST_F(TimelineTest, RemembersNoMemoryThatItWasNotTold) {
  add_memory(Where::kRegisteredHost);
  for (const size_t stream : {compute_, copies_}) give(stream, "copy", {writes(kBytes, 2 * kBytes)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  EXPECT_TRUE(timeline_.is_pinned(kMemory + kBytes - 1));
  EXPECT_FALSE(timeline_.is_pinned(kMemory + kBytes));
  EXPECT_FALSE(timeline_.is_pinned(kMemory - 1));
}

TEST_F(TimelineTest, AccessesMayBeAddedAfterTheirTask) {
  add_memory();
  const Point task = give(compute_, "operator");
  timeline_.add_access(task, "operator", writes(0, 8));
  give(copies_, "copy", {reads(0, 8)});
  EXPECT_EQ(timeline_.take_reports().size(), 1U);
}

// Its task came before what its stream waits for since, and before its later tasks.
TEST_F(TimelineTest, AnAddedAccessHasTheTimeOfItsTask) {
  add_memory();
  const Point copy = give(copies_, "copy", {writes(0, 8)});
  const Point task = give(compute_, "operator");
  timeline_.block(compute_, copy);
  give(compute_, "later", {writes(20, 30)});
  timeline_.block(copies_, task);
  timeline_.add_access(task, "operator", writes(20, 30));
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  timeline_.add_access(task, "operator", writes(40, 50));
  give(copies_, "ordered", {reads(40, 50)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  timeline_.add_access(task, "operator", reads(0, 8));
  EXPECT_EQ(timeline_.take_reports().size(), 1U);
}

TEST_F(TimelineTest, ReportsFreedMemoryInUseOnAnotherStream) {
  add_memory();
  const Point copy = give(copies_, "copy", {reads(0, 8)});
  EXPECT_FALSE(released_by_free());
  EXPECT_THAT(timeline_.take_reports(),
              ElementsAre("device memory of 100 bytes is freed, not ordered after copy, which reads bytes 0 to 8 on "
                          "stream 7 of cuda:0"));
  timeline_.wait(copy, "test");
  EXPECT_TRUE(released_);
}

TEST_F(TimelineTest, MemoryOfAUserIsReleasedWhenItsStreamIsThrough) {
  add_memory();
  const Point copy = give(copies_, "copy", {reads(0, 8)});
  const Point last = give(copies_, "later copy");
  timeline_.add_user(kMemory + 50, copies_);
  EXPECT_FALSE(released_by_free());
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  timeline_.run_until(copy);
  EXPECT_FALSE(released_);
  timeline_.run_until(last);
  EXPECT_TRUE(released_);
}

TEST_F(TimelineTest, MemoryMayBeFreedOnceItsStreamWaits) {
  add_memory();
  give(compute_, "fill", {writes(0, 100)});
  timeline_.block(copies_, timeline_.now(compute_));
  timeline_.block(compute_, give(copies_, "copy", {reads(0, 100)}));
  EXPECT_FALSE(released_by_free());
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  timeline_.wait_for_all();
  EXPECT_TRUE(released_);
}

TEST_F(TimelineTest, MemoryThatNothingUsesIsReleasedAtOnce) {
  add_memory();
  timeline_.wait_for_all();
  EXPECT_TRUE(released_by_free());
  give(copies_, "not of this memory", {writes(0, 8)});
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, ReportsPinnedMemoryFreedDuringACopy) {
  add_memory(Where::kRegisteredHost);
  EXPECT_TRUE(timeline_.is_pinned(kMemory + 99));
  const Point copy = give(compute_, "copy", {reads(0, 8)});
  EXPECT_FALSE(released_by_free());
  EXPECT_THAT(
      timeline_.take_reports(),
      ElementsAre("pinned memory of 100 bytes is freed, not ordered after copy, which reads bytes 0 to 8 on the "
                  "default stream of cuda:0"));
  EXPECT_FALSE(timeline_.is_pinned(kMemory + 99));
  timeline_.wait(copy, "test");
}

// run_until is what streams do, which tells the host nothing.
TEST_F(TimelineTest, OwnersOfPinnedMemoryWaitForItsCopies) {
  for (const bool waits : {false, true}) {
    add_memory(Where::kRegisteredHost);
    const Point copy = give(copies_, "copy", {reads(0, 8)});
    timeline_.run_until(copy);
    if (waits) timeline_.wait(copy, "test");
    released_by_free();
    EXPECT_EQ(timeline_.take_reports().size(), waits ? 0U : 1U);
  }
}

TEST_F(TimelineTest, AllocatedPinnedMemoryIsHeldForItsCopies) {
  add_memory(Where::kAllocatedHost);
  const Point copy = give(copies_, "copy", {reads(0, 8)});
  EXPECT_FALSE(released_by_free());
  timeline_.wait(copy, "test");
  EXPECT_TRUE(released_);
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, ReportsWhatTheHostChangesTooEarly) {
  add_memory(Where::kRegisteredHost);
  const Point copy = give(copies_, "copy", {reads(0, 8)});
  timeline_.run_until(copy);
  ++host_bytes[7];
  timeline_.wait(copy, "test");
  EXPECT_THAT(timeline_.take_reports(),
              ElementsAre("the host changed pinned memory, 8 bytes, before it had waited for copy, which reads it on "
                          "stream 7 of cuda:0"));
}

TEST_F(TimelineTest, TheHostMayChangeWhatNoStreamReads) {
  add_memory(Where::kRegisteredHost);
  const Point copy = give(copies_, "copy", {reads(0, 8)});
  timeline_.run_until(copy);
  ++host_bytes[8];
  timeline_.wait(copy, "test");
  ++host_bytes[7];
  timeline_.wait_for_all();
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

TEST_F(TimelineTest, StreamsMayChangeWhatOthersHaveRead) {
  add_memory(Where::kRegisteredHost);
  timeline_.block(compute_, give(copies_, "copy to the device", {reads(0, 8)}));
  timeline_.wait(timeline_.enqueue(compute_, "copy from the device", {writes(4, 12)}, [] { ++host_bytes[7]; }), "test");
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

// Nobody may look at freed memory again.
TEST_F(TimelineTest, ForgetsReadsOfFreedMemory) {
  for (const bool runs_before : {false, true}) {
    add_memory(Where::kAllocatedHost);
    const Point copy = give(copies_, "copy", {reads(0, 8)});
    if (runs_before) timeline_.run_until(copy);
    timeline_.free_memory(kMemory, [] { ++host_bytes[0]; });
    timeline_.run_until(copy);
    timeline_.wait(copy, "test");
    EXPECT_THAT(timeline_.take_reports(), IsEmpty());
  }
}

TEST_F(TimelineTest, DeviceMemoryIsNotPinned) {
  add_memory();
  EXPECT_FALSE(timeline_.is_pinned(kMemory));
  EXPECT_FALSE(timeline_.is_pinned(kMemory + kBytes));
}

// Streams go on after an exception, in the order that they would have had.
TEST_F(TimelineTest, ExceptionsOfTasksComeOutOfTheFirstWait) {
  timeline_.enqueue(copies_, "copy", {}, [] { throw std::runtime_error("no such page"); });
  timeline_.block(compute_, give(copies_, "later copy"));
  const Point kernel = give(compute_, "kernel");
  EXPECT_THAT([&] { timeline_.wait(kernel, "test"); },
              testing::ThrowsMessage<std::runtime_error>(testing::StrEq("no such page")));
  EXPECT_THAT(ran_, ElementsAre("later copy", "kernel"));
  timeline_.wait(kernel, "test");
  timeline_.wait_for_all();
  EXPECT_THAT(ran_, ElementsAre("later copy", "kernel"));
}

// A task's captures may be the last that hold memory.
TEST_F(TimelineTest, TasksMayFreeMemoryWhenTheyEnd) {
  add_memory();
  std::shared_ptr<void> held(nullptr, [this](void*) { released_by_free(); });
  timeline_.enqueue(compute_, "fill", {writes(0, 8)}, [held = std::move(held)] {});
  timeline_.wait_for_all();
  EXPECT_TRUE(released_);
  EXPECT_THAT(timeline_.take_reports(), IsEmpty());
}

// What one thread gave, and what the streams made of it.
struct Given {
  Point point;
  size_t thread = 0;
  int number = 0;
};

TEST_F(TimelineTest, ThreadsShareStreams) {
  constexpr size_t kThreads = 4;
  constexpr size_t kStreams = 3;
  constexpr int kTasks = 500;
  std::array<size_t, kStreams> streams{};
  for (size_t s = 0; s < kStreams; ++s) streams.at(s) = timeline_.stream(2, static_cast<int64_t>(s));
  std::array<std::vector<std::pair<size_t, int>>, kStreams> ran;  // without a lock: a stream runs one task at a time
  std::array<std::vector<Given>, kThreads> given;
  std::atomic<int> too_early = 0;

  const auto work = [&](size_t thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    auto before = std::make_shared<std::atomic<bool>>(true);
    for (int i = 0; i < kTasks; ++i) {
      const size_t s = random() % kStreams;
      // Each task comes after the thread's last one, by an event.
      if (i > 0) timeline_.block(streams.at(s), given.at(thread).back().point);
      auto done = std::make_shared<std::atomic<bool>>(false);
      const Point point = timeline_.enqueue(streams.at(s), "task", {}, [&, before, done, thread, i, s] {
        if (!*before) ++too_early;
        ran.at(s).emplace_back(thread, i);
        *done = true;
      });
      given.at(thread).push_back({point, thread, i});
      before = done;
      const Given& earlier = given.at(thread).at(random() % given.at(thread).size());
      if (random() % 4 == 0) timeline_.run_until(earlier.point);
      if (random() % 8 == 0) timeline_.wait(earlier.point, "test");
      if (random() % 64 == 0) timeline_.wait_for_all();
      if (timeline_.reached(point) && !*done) ++too_early;
    }
  };
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  timeline_.wait_for_all();

  EXPECT_EQ(too_early, 0);
  for (size_t s = 0; s < kStreams; ++s) {
    std::map<uint64_t, std::pair<size_t, int>> by_position;
    for (const std::vector<Given>& of_thread : given) {
      for (const Given& task : of_thread) {
        if (task.point.stream == streams.at(s)) by_position[task.point.position] = {task.thread, task.number};
      }
    }
    std::vector<std::pair<size_t, int>> expected;
    for (const auto& [position, task] : by_position) expected.push_back(task);
    EXPECT_EQ(ran.at(s), expected) << "each once, in the order in which the stream got them";
  }
}

}  // namespace
}  // namespace ds::simulated_gpu
