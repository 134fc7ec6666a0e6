#include "pipeline/schedule/schedule_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace ds::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using enum ScheduleKind;

TEST(ScheduleFile, WhatIsWrittenIsRead) {
  for (const ScheduleKind kind : {kGPipe, k1F1B, kInterleaved, kZbH1, kZbH2, kZbV, kDualPipeV, kInference}) {
    const int chunks = kind == kInterleaved || kind == kZbV || kind == kDualPipeV ? 2 : 1;
    const Schedule schedule = make_schedule(kind, {.ranks = 3, .chunks = chunks, .micro_batches = 7});
    const Schedule read = parse_schedule(to_csv(schedule), "mine");
    EXPECT_EQ(read.name, "mine");
    EXPECT_EQ(read.actions, schedule.actions) << name_of(kind);
    EXPECT_EQ(read.rank_of, schedule.rank_of) << name_of(kind);
    EXPECT_EQ(read.training, schedule.training) << name_of(kind);
    EXPECT_EQ(read.shape.micro_batches, 7);
    EXPECT_EQ(read.shape.chunks, chunks);
  }
}

TEST(ScheduleFile, IdleCellsBlanksAndOverlapsMeanNothing) {
  const Schedule schedule = parse_schedule(
      "0F0, 0F1 ,,0B0,,0B1,\r\n"
      ",1F0,1B0,(1F1;1B1)OVERLAP_F_B\r\n"
      "\n",
      "mine");
  EXPECT_EQ(to_csv(schedule), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
}

TEST(ScheduleFile, MistakesNameFileLineAndCell) {
  const auto expect = [](const char* text, const auto& matcher) {
    EXPECT_THAT([&] { parse_schedule(text, "my.csv"); }, ThrowsMessage<ConfigError>(matcher)) << text;
  };
  expect("0F0,0B0\n1F0,1X0", AllOf(HasSubstr("my.csv, line 2, cell 2: "), HasSubstr("found \"1X0\"")));
  expect("0F0,0SF0,0B0", AllOf(HasSubstr("my.csv, line 1, cell 2: "), HasSubstr("leave it out")));
  expect("0F0,,STEP", HasSubstr("my.csv, line 1, cell 3: "));
  expect("\n \n", HasSubstr("my.csv: expected a line for each rank"));
  expect("0F0,0B0\n0F1", AllOf(HasSubstr("my.csv, line 2: 0F1: stage 0 is on rank 0, line 1")));
  expect("0F0,0B0\n2F0,2B0", HasSubstr("found none of stage 1"));
  expect("0F0,2F0\n1F0", HasSubstr("my.csv, line 2: expected at least 1 stage, and as many on each rank; found 1"));
  expect("0F0\n\n1F0", HasSubstr("my.csv, line 2: expected at least 1 stage"));
  expect("0F0,0F1000000000", HasSubstr("my.csv, line 1: 0F1000000000: expected a stage and a micro-batch below 2"));
  expect("0F0,0F1,0B0\n1F0,1F1,1B0,1B1", AllOf(HasSubstr("schedule my.csv: "), HasSubstr("0B1")));
  expect("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", HasSubstr("in a circle"));
}

TEST(ScheduleFile, AFileIsRead) {
  const test::ScratchFolder folder;
  const std::string path = folder.write("mine.csv", "0F0\n1F0\n");
  const Schedule schedule = read_schedule(path);
  EXPECT_EQ(schedule.name, path);
  EXPECT_THAT(schedule.rank_of, ElementsAre(0, 1));
  EXPECT_FALSE(schedule.training);
  EXPECT_THAT([&] { read_schedule(folder / "none.csv"); }, ThrowsMessage<IoError>(HasSubstr("none.csv")));
  EXPECT_THAT([&] { read_schedule(folder.path().string()); }, ThrowsMessage<IoError>(HasSubstr("found a folder")));
}

}  // namespace
}  // namespace ds::pipeline
