#include "comm/flight/flight_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "comm/flight/flight_memory.h"
#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace ds::comm::testing {
namespace {

namespace fs = std::filesystem;

void make_file(const fs::path& path, int days_old) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << "x";
  fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(24 * days_old));
}

// The base may be any folder of the user's.
TEST(FlightFolder, RemovesOldRecordsAndNothingElse) {
  const test::ScratchFolder scratch;
  const fs::path base = scratch / "base";
  make_file(base / "old" / "rank0.flight", 8);
  make_file(base / "old" / "stall1" / "rank3.flight", 8);
  make_file(base / "old" / "stall1" / "summary.txt", 8);
  make_file(base / "young" / "rank0.flight", 6);
  make_file(base / "in_use" / "rank0.flight", 8);
  make_file(base / "in_use" / "rank1.flight", 0);
  make_file(base / "global_step100" / "weights.safetensors", 100);
  make_file(base / "mixed" / "rank0.flight", 8);
  make_file(base / "mixed" / "notes.txt", 8);
  make_file(base / "deep" / "rank0.flight", 8);
  make_file(base / "deep" / "stall1" / "kept" / "rank0.flight", 8);
  make_file(base / "file", 100);
  fs::create_directory(base / "empty");
  fs::create_directory_symlink(base / "young", base / "link");
  EXPECT_EQ(make_flight_folder(base, "new"), (base / "new").string());
  EXPECT_FALSE(fs::exists(base / "old"));
  for (const char* kept :
       {"young/rank0.flight", "in_use/rank0.flight", "global_step100/weights.safetensors", "mixed/rank0.flight",
        "mixed/notes.txt", "deep/rank0.flight", "deep/stall1/kept/rank0.flight", "file", "empty", "link", "new"}) {
    EXPECT_TRUE(fs::exists(base / kept)) << kept;
  }
}

// In a folder where everybody may write.
TEST(FlightFolder, LeadsThroughNoLink) {
  const test::ScratchFolder scratch;
  const test::ScratchFolder victim;
  ::setenv("TMPDIR", scratch.path().c_str(), 1);
  const fs::path shared = scratch / cat("dsengine-", getuid());
  EXPECT_EQ(make_flight_folder("", "job"), (shared / "job").string());
  EXPECT_EQ(fs::status(shared / "job").permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(shared).permissions(), fs::perms::owner_all);
  fs::remove_all(shared / "job");
  fs::permissions(victim.path(), fs::perms::owner_all | fs::perms::group_read);
  fs::create_directory_symlink(victim.path(), shared / "job");
  EXPECT_EQ(make_flight_folder("", "job"), "");
  EXPECT_EQ(make_flight_folder(shared, "job"), "");
  EXPECT_EQ(fs::status(victim.path()).permissions(), fs::perms::owner_all | fs::perms::group_read);
  fs::remove_all(shared);
  fs::create_directory_symlink(victim.path(), shared);
  EXPECT_EQ(make_flight_folder("", "job"), "");
  ::unsetenv("TMPDIR");
  EXPECT_TRUE(fs::is_empty(victim.path()));

  std::ofstream(victim / "kept") << "x";
  fs::create_symlink(victim / "kept", scratch / "rank0.flight");
  EXPECT_THROW(FlightMemory((scratch / "rank0.flight"), 100), IoError);
  EXPECT_EQ(fs::file_size(victim / "kept"), 1U);
}

// What is written through a mapping may leave the time of the file as it is.
TEST(FlightFolder, RecordsThatAreWrittenToAreKeptHoweverOld) {
  const test::ScratchFolder scratch;
  const fs::path base = scratch / "base";
  make_file(base / "runs" / "rank0.flight", 8);
  make_file(base / "runs" / "rank1.flight", 8);
  {
    FlightMemory memory((base / "runs" / "rank1.flight").string(), 100);
    memory.keep();
    fs::last_write_time(base / "runs" / "rank1.flight", fs::file_time_type::clock::now() - std::chrono::hours(24 * 8));
    make_flight_folder(base, "new");
    EXPECT_TRUE(fs::exists(base / "runs" / "rank0.flight"));
    EXPECT_TRUE(fs::exists(base / "runs" / "rank1.flight"));
  }
  make_flight_folder(base, "new");
  EXPECT_FALSE(fs::exists(base / "runs"));
}

TEST(FlightFolder, TellsWhetherItHoldsRecords) {
  const test::ScratchFolder scratch;
  EXPECT_FALSE(holds_records(scratch / "none"));
  make_file(fs::path(scratch / "notes.txt"), 0);
  EXPECT_FALSE(holds_records(scratch.path()));
  make_file(fs::path(scratch / "a/rank7.flight"), 0);
  EXPECT_TRUE(holds_records(scratch / "a"));
  fs::create_directories(scratch.path() / "b" / "stall1");
  EXPECT_TRUE(holds_records(scratch / "b"));
}

TEST(FlightFolder, OneThatCannotBeMadeIsNoError) {
  const test::ScratchFolder scratch;
  make_file(fs::path(scratch / "file"), 0);
  EXPECT_EQ(make_flight_folder(scratch / "file", "job"), "");
}

}  // namespace
}  // namespace ds::comm::testing
