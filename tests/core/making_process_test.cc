#include "core/making_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <functional>
#include <optional>

#include "core/files/atomic_file.h"
#include "tests/support/scratch_folder.h"

namespace ds {
namespace {

// The exit code of a forked child that does `body`.
int code_of_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct CountsEnds {
  explicit CountsEnds(int& ended) : ended_(ended) {}
  ~CountsEnds() { ++ended_; }
  int& ended_;
};

TEST(MakingProcess, IsNotItsForkedChild) {
  const MakingProcess process;
  EXPECT_TRUE(process.is_this());
  EXPECT_EQ(code_of_child([&] { return process.is_this() ? 1 : 0; }), 0);
}

TEST(MakingProcess, AloneEndsWhatItMade) {
  int ended = 0;
  auto shared = make_shared_where_made<CountsEnds>(ended);
  auto owned = make_owned_where_made<CountsEnds>(ended);
  const auto drop = [&] {
    shared.reset();
    owned.reset();
    return ended;
  };
  EXPECT_EQ(code_of_child(drop), 0);
  EXPECT_EQ(drop(), 2);
}

TEST(MakingProcess, AChildLeavesAFileThatIsBeingWritten) {
  const test::ScratchFolder folder;
  std::optional<AtomicFile> file(folder / "weights");
  file->write("all", 3);
  EXPECT_EQ(code_of_child([&] {
              file.reset();
              return 0;
            }),
            0);
  file->commit();
  EXPECT_EQ(std::filesystem::file_size(folder / "weights"), 3U);
}

}  // namespace
}  // namespace ds
