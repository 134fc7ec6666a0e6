// What only a process of its own can show: kill -9, limits, and rights that are missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <thread>

#include "core/check.h"
#include "offload/aio_file.h"
#include "offload/slice_swapper.h"
#include "tests/offload/aligned_memory.h"
#include "tests/support/process_ranks.h"

namespace ds::offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr const char* kPath = "zero_optimization.offload_optimizer.nvme_path";

std::unique_ptr<AioFile> file_in(const std::string& folder, int64_t bytes) {
  return std::make_unique<AioFile>(folder, "state", bytes, AioOptions{.block_size = 16'384, .queue_depth = 3}, kPath);
}

// From now on this process cannot write beyond so many bytes of a file.
void limit_file_size(rlim_t bytes) {
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{bytes, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) throw std::runtime_error("cannot set RLIMIT_FSIZE");
}

// From now on io_uring_setup fails with `error`, as under a container's seccomp profile.
void forbid_io_uring(int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("cannot install a seccomp filter");
  }
}

DS_PROCESS_TEST(AioProcess, IoUringThatIsNotPermitted, 1) {
  forbid_io_uring(EPERM);
  EXPECT_THAT([&] { file_in(ranks.folder(), 4096); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(kPath), HasSubstr("io_uring is not permitted"),
                                               HasSubstr("seccomp"), HasSubstr("io_uring_disabled"))));
}

DS_PROCESS_TEST(AioProcess, AKernelWithoutIoUring, 1) {
  forbid_io_uring(ENOSYS);
  EXPECT_THAT([&] { file_in(ranks.folder(), 4096); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(kPath), HasSubstr("no io_uring"), HasSubstr("Linux 5.12"))));
}

DS_PROCESS_TEST(AioProcess, AFolderThatMayNotBeWritten, 1) {
  const std::string folder = ranks.folder() + "/locked";
  std::filesystem::create_directory(folder);
  ::chmod(ranks.folder().c_str(), 0755);
  ::chmod(folder.c_str(), 0555);
  if (::geteuid() == 0) ASSERT_EQ(::seteuid(65534), 0);  // root may write anywhere
  EXPECT_THAT([&] { file_in(folder, 4096); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(kPath), HasSubstr("cannot make a file"), HasSubstr(folder),
                                               HasSubstr("Permission denied"))));
}

DS_PROCESS_TEST(AioProcess, AFileLargerThanTheLimit, 1) {
  limit_file_size(1 << 20);
  EXPECT_THAT([&] { file_in(ranks.folder(), 2 << 20); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(kPath), HasSubstr("too large"), HasSubstr("ulimit -f"))));
}

DS_PROCESS_TEST(AioProcess, AWriteThatFailsIsCutShortWhereTheLimitIs, 1) {
  const auto file = file_in(ranks.folder(), 1 << 20);
  const at::Tensor written = random_bytes(1 << 20);
  limit_file_size(3 * 16'384 + 4096);
  const auto ticket = file->write(0, written.data_ptr(), written.numel());
  EXPECT_THAT([&] { file->wait(ticket); },
              ThrowsMessage<IoError>(AllOf(HasSubstr(file->path()), HasSubstr("cannot write"), HasSubstr("at offset"),
                                           HasSubstr("File too large"), HasSubstr("ulimit -f"))));
  file->wait(file->write(0, written.data_ptr(), 3 * 16'384 + 4096));
  limit_file_size(RLIM_INFINITY);
  file->wait(file->write(16 * 16'384, written.data_ptr(), 16'384));
  const at::Tensor read = aligned_bytes(1 << 20);
  file->wait(file->read(0, read.data_ptr(), read.numel()));
  EXPECT_TRUE(read.slice(0, 0, 3 * 16'384 + 4096).equal(written.slice(0, 0, 3 * 16'384 + 4096)));
}

// Slices of one float32 tensor of `numel`, holding their index.
std::unique_ptr<SliceSwapper> swapper_in(const std::string& folder, int64_t slices, int64_t numel) {
  const SwapSizes sizes = SliceSwapper::sizes(std::vector<std::vector<int64_t>>(slices, {numel * 4}), 3);
  auto swapper =
      std::make_unique<SliceSwapper>(file_in(folder, sizes.file_bytes), aligned_bytes(sizes.buffer_bytes), 3);
  for (int64_t i = 0; i < slices; ++i) swapper->add({torch::full({numel}, static_cast<float>(i))});
  swapper->flush();
  return swapper;
}

DS_PROCESS_TEST(AioProcess, AFailedWriteEndsTheSwapper, 1) {
  for (const PassOptions options : {PassOptions{}, PassOptions{false, false}, PassOptions{true, false}}) {
    limit_file_size(RLIM_INFINITY);
    const auto swapper = swapper_in(ranks.folder(), 8, 16'384);
    limit_file_size(4 * 65'536 + 8192);
    const auto pass = [&] {
      swapper->for_each(
          {0, 1, 2, 3, 4, 5, 6, 7}, [&](int64_t i) { swapper->tensors(i)[0].add_(1); }, options);
    };
    const auto failed = ThrowsMessage<IoError>(
        AllOf(HasSubstr("slice 4 could not be written"), HasSubstr("File too large"), HasSubstr("checkpoints")));
    EXPECT_THAT(pass, failed);
    limit_file_size(RLIM_INFINITY);
    EXPECT_THAT(pass, failed);
    EXPECT_THAT([&] { swapper->with(0, false, [](int64_t) {}); }, failed);
    EXPECT_THAT([&] { swapper->flush(); }, failed);
    EXPECT_THAT([&] { swapper->add({torch::zeros({1})}); }, failed);
    for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(swapper->tensors(i)[0].storage().nbytes(), 0U);
  }
}

DS_PROCESS_TEST(AioProcess, AFailedWriteIsNotHiddenByAnExceptionOfUse, 1) {
  const auto swapper = swapper_in(ranks.folder(), 3, 16'384);
  limit_file_size(65'536 + 8192);
  EXPECT_THAT(
      [&] {
        swapper->for_each({0, 1, 2},
                          [](int64_t index) {
                            if (index == 2) throw std::runtime_error("no");
                          },
                          {.read_ahead = false, .write_behind = true});
      },
      ThrowsMessage<std::runtime_error>("no"));
  EXPECT_THAT([&] { swapper->with(0, false, [](int64_t) {}); },
              ThrowsMessage<IoError>(HasSubstr("slice 1 could not be written")));
}

DS_PROCESS_TEST(AioProcess, NothingIsLeftWhenKilledWhileSwapping, 2, std::chrono::seconds(60), {0}) {
  const std::string folder = ranks.folder() + "/swap";
  const std::string note = ranks.folder() + "/process";
  if (ranks.rank() == 0) {
    std::filesystem::create_directory(folder);
    const auto swapper = swapper_in(folder, 8, 1 << 20);
    std::ofstream(note + ".new") << ::getpid();
    std::filesystem::rename(note + ".new", note);
    swapper->for_each({0, 1, 2, 3, 4, 5, 6, 7}, [](int64_t index) {
      if (index == 3) testing::ProcessRank::kill_self();
    });
    return;
  }
  while (!std::filesystem::exists(note)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  pid_t process = 0;
  std::ifstream(note) >> process;
  ASSERT_GT(process, 0);
  while (::kill(process, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

}  // namespace
}  // namespace ds::offload
