// Regions of host memory: what they take from the system, what they hand out, when they go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "offload/pinned_arena.h"

namespace ds::offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kPage = 4096;
constexpr int64_t kNoise = 1 << 20;  // what else a process maps meanwhile, a sanitizer too

// Bytes that this process has mapped, and those of them that are in memory.
struct Usage {
  int64_t mapped = 0;
  int64_t resident = 0;
};

Usage usage_now() {
  Usage usage;
  std::ifstream("/proc/self/statm") >> usage.mapped >> usage.resident;
  return {usage.mapped * sysconf(_SC_PAGESIZE), usage.resident * sysconf(_SC_PAGESIZE)};
}

bool all_resident(const void* data, size_t bytes) {
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  if (mincore(const_cast<void*>(data), bytes, pages.data()) != 0) return false;
  return std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

void warm_up() {
  PinnedArena first("a first use", 3 * kPage, {});
  first.take(4, at::kFloat);
  usage_now();
}

class PinnedArenaSizes : public ::testing::TestWithParam<bool> {};

TEST_P(PinnedArenaSizes, TakesWhatWasAskedAndGivesItBack) {
  warm_up();
  // Far from a power of two, and not whole huge pages.
  constexpr int64_t kBytes = (int64_t{37} << 20) + 3 * kPage;
  const Usage before = usage_now();
  {
    const PinnedArena arena("optimizer states", kBytes, {.huge_pages = GetParam()});
    const Usage during = usage_now();
    EXPECT_EQ(arena.size(), static_cast<size_t>(kBytes));
    EXPECT_NEAR(during.mapped - before.mapped, kBytes, kNoise);
    EXPECT_NEAR(during.resident - before.resident, kBytes, kNoise) << "its pages exist from the start";
  }
  const Usage after = usage_now();
  EXPECT_NEAR(after.mapped, before.mapped, kNoise);
  EXPECT_NEAR(after.resident, before.resident, kNoise);
}

INSTANTIATE_TEST_SUITE_P(SmallAndHugePages, PinnedArenaSizes, ::testing::Bool());

TEST(PinnedArena, SizesAreWholePages) {
  EXPECT_EQ(PinnedArena("a byte", 1, {}).size(), kPage);
  EXPECT_EQ(PinnedArena("a page", kPage, {}).size(), kPage);
  EXPECT_EQ(PinnedArena("a page and a byte", kPage + 1, {}).size(), 2 * kPage);
}

TEST(PinnedArena, TensorsAreAlignedZerosOfOneRegion) {
  EXPECT_EQ(PinnedArena::bytes_of(0, at::kFloat), 0u);
  EXPECT_EQ(PinnedArena::bytes_of(1, at::kFloat), kPage);
  EXPECT_EQ(PinnedArena::bytes_of(1025, at::kFloat), 2 * kPage);
  EXPECT_EQ(PinnedArena::bytes_of(2048, at::kBFloat16), kPage);

  PinnedArena arena("gradients", 4 * kPage, {});
  EXPECT_EQ(arena.purpose(), "gradients");
  EXPECT_EQ(arena.used(), 0u);
  const at::Tensor one = arena.take(3, at::kFloat);
  const at::Tensor two = arena.take(2049, at::kBFloat16);
  const at::Tensor three = arena.take(512, at::kDouble);
  EXPECT_EQ(arena.used(), arena.size());
  EXPECT_EQ(one.scalar_type(), at::kFloat);
  EXPECT_EQ(two.scalar_type(), at::kBFloat16);
  for (const at::Tensor& tensor : {one, two, three}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % PinnedArena::kAlignment, 0u);
    EXPECT_EQ(tensor.dim(), 1);
    EXPECT_FALSE(tensor.requires_grad());
    EXPECT_EQ(tensor.count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(tensor.storage().nbytes(), static_cast<size_t>(tensor.numel()) * tensor.element_size());
    EXPECT_TRUE(all_resident(tensor.data_ptr(), tensor.storage().nbytes()));
  }
  const auto distance = [&](const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.data_ptr()) - static_cast<std::byte*>(one.data_ptr());
  };
  EXPECT_EQ(distance(two), 1 * kPage);
  EXPECT_EQ(distance(three), 3 * kPage);
  one.fill_(1);
  three.fill_(3);
  EXPECT_EQ(two.count_nonzero().item<int64_t>(), 0);
}

TEST(PinnedArena, MoreThanTheRegionIsRefused) {
  PinnedArena arena("gradients", 2 * kPage, {});
  arena.take(1, at::kFloat);
  EXPECT_THROW(arena.take(1025, at::kFloat), InternalError);
  EXPECT_EQ(arena.used(), kPage) << "a refused part takes nothing";
  arena.take(1024, at::kFloat);
  EXPECT_THROW(arena.take(1, at::kByte), InternalError);
  EXPECT_THROW(arena.take(-1, at::kByte), InternalError);
}

TEST(PinnedArena, AnEmptyOneHandsOutEmptyTensors) {
  PinnedArena arena("nothing", 0, {});
  EXPECT_EQ(arena.size(), 0u);
  EXPECT_FALSE(arena.pinned());
  EXPECT_FALSE(arena.huge_pages());
  const at::Tensor none = arena.take(0, at::kFloat);
  EXPECT_EQ(none.numel(), 0);
  EXPECT_TRUE(at::equal(none, at::empty({0})));
  EXPECT_THROW(arena.take(1, at::kFloat), InternalError);
}

TEST(PinnedArena, TheLastTensorKeepsTheRegion) {
  warm_up();
  constexpr int64_t kBytes = int64_t{16} << 20;
  const Usage before = usage_now();
  at::Tensor kept;
  {
    PinnedArena arena("optimizer states", kBytes, {});
    arena.take(1000, at::kFloat);
    kept = arena.take(1000, at::kFloat).fill_(7);
  }
  EXPECT_NEAR(usage_now().mapped - before.mapped, kBytes, kNoise);
  EXPECT_EQ(kept.sum().item<double>(), 7000.0);
  const at::Tensor view = kept.narrow(0, 10, 10);
  kept.reset();
  EXPECT_EQ(view.sum().item<double>(), 70.0);
}

TEST(PinnedArena, TheLastTensorGivesTheRegionBack) {
  warm_up();
  constexpr int64_t kBytes = int64_t{16} << 20;
  const Usage before = usage_now();
  at::Tensor kept = PinnedArena("optimizer states", kBytes, {}).take(1000, at::kFloat);
  EXPECT_NEAR(usage_now().mapped - before.mapped, kBytes, kNoise);
  kept.reset();
  EXPECT_NEAR(usage_now().mapped, before.mapped, kNoise);
}

TEST(PinnedArena, MemoryOfTensorsCanBeExchanged) {
  PinnedArena arena("parameters", 2 * kPage, {});
  const at::Tensor one = arena.take(8, at::kFloat).fill_(1);
  const at::Tensor two = arena.take(8, at::kFloat).fill_(2);
  const at::Tensor view = one.narrow(0, 2, 3);
  c10::DataPtr of_one = take_storage(one);
  give_storage(one, take_storage(two), 8 * sizeof(float));
  give_storage(two, std::move(of_one), 8 * sizeof(float));
  EXPECT_EQ(view.sum().item<double>(), 6.0);
  EXPECT_EQ(two.sum().item<double>(), 8.0);
}

TEST(PinnedArena, OnTheCpuNothingIsPinned) {
  const PinnedArena arena("optimizer states", kPage, {.pin = true});
  EXPECT_FALSE(arena.pinned());
}

TEST(PinnedArena, HugePagesAreThoseThatTheKernelOffers) {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::string choice{std::istreambuf_iterator<char>(in), {}};
  const bool offered = choice.find("[always]") != std::string::npos || choice.find("[madvise]") != std::string::npos;
  PinnedArena arena("optimizer states", size_t{8} << 20, {});
  EXPECT_EQ(arena.huge_pages(), offered);
  if (offered)
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.take(1, at::kFloat).data_ptr()) % (size_t{2} << 20), 0u)
        << "else the first and last pages would be small";
  EXPECT_FALSE(PinnedArena("optimizer states", size_t{8} << 20, {.huge_pages = false}).huge_pages());
}

TEST(PinnedArena, SaysWhatItTakes) {
  ::testing::internal::CaptureStderr();
  const PinnedArena arena("optimizer states", size_t{3} << 20, {.huge_pages = false});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("host memory: 3.0 MiB for optimizer states"));
}

// Without a usable GPU the registration fails; with one it works. Either way the memory can be used.
TEST(PinnedArena, MemoryThatCannotBePinnedIsPageableAndSaysSo) {
  ::testing::internal::CaptureStderr();
  PinnedArena arena("optimizer states", size_t{3} << 20, {.device = at::Device(at::kCUDA, 0)});
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (!arena.pinned()) {
    EXPECT_THAT(said, AllOf(HasSubstr("3.0 MiB for optimizer states could not be pinned"), HasSubstr("locked memory: "),
                            HasSubstr("stays pageable"), HasSubstr("cuda:0")));
  } else {
    EXPECT_THAT(said, HasSubstr("pinned"));
  }
  EXPECT_EQ(arena.take(100, at::kFloat).fill_(2).sum().item<double>(), 200.0);
}

void limit_address_space(int64_t more) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = static_cast<rlim_t>(usage_now().mapped + more);
  setrlimit(RLIMIT_AS, &limit);
}

void ask_for_too_much() {
  limit_address_space(int64_t{64} << 20);
  try {
    const PinnedArena fits("gradients", size_t{16} << 20, {});
    const PinnedArena arena("optimizer states", size_t{256} << 20, {});
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "refused: %s\n", error.what());
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST(PinnedArenaDeathTest, TooMuchIsRefusedWithNumbers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ask_for_too_much(), ::testing::ExitedWithCode(0),
              AllOf(HasSubstr("refused: host memory for optimizer states: needs 256.0 MiB in this process"),
                    HasSubstr("RLIMIT_AS (ulimit -v)"), HasSubstr("nvme")));
}

}  // namespace
}  // namespace ds::offload
