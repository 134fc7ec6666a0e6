// A rank without memory for the next bucket: what it does about it concerns this rank alone.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/factory.h"
#include "core/check.h"
#include "tests/support/process_ranks.h"
#include "zero/parameter_gatherer.h"

namespace ds::zero {
namespace {

constexpr int64_t kColumns = 1024;
constexpr int64_t kUnit = int64_t{4} << 20;  // elements, 16 MiB

// Private writable memory of this process.
int64_t mapped_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) return std::stoll(line.substr(7)) * 1024;
  }
  throw std::runtime_error("/proc/self/status: no VmData");
}

// While it lives, this process can map nothing until it holds `bytes` less than now.
class Shortage {
 public:
  explicit Shortage(int64_t bytes) {
    ensure(getrlimit(RLIMIT_DATA, &before_) == 0, "no limit to read");
    rlimit bounds = before_;
    bounds.rlim_cur = static_cast<rlim_t>(mapped_bytes() - bytes);
    ensure(setrlimit(RLIMIT_DATA, &bounds) == 0, "no limit can be set");
  }
  ~Shortage() { setrlimit(RLIMIT_DATA, &before_); }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

 private:
  rlimit before_{};
};

DS_PROCESS_TEST(GatherLimit, ARankThatIsShortOfMemoryReleasesNothingThatOthersKeep, 2) {
  at::set_num_threads(1);
  const auto communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  const auto group = communicator->new_group({0, 1}, "parameters");
  // Eight buckets of one unit that fill the pool, one that stays, one of another size that does not fit it.
  std::vector<Parameter> parameters;
  std::vector<LayoutParameter> shapes;
  for (int i = 0; i < 10; ++i) {
    const int64_t elements = i == 9 ? 2 * kUnit : kUnit;
    parameters.push_back({cat("weight", i), torch::full({elements / kColumns, kColumns}, i + 1.0)});
    shapes.push_back({parameters.back().name, elements});
  }
  std::vector<ParameterBucket> buckets;
  for (BucketLayout& layout : lay_out(shapes, {.world_size = 2, .max_bucket_elements = kUnit})) {
    const at::Tensor values = flatten(layout, parameters, at::kFloat);
    buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
  }
  ASSERT_EQ(buckets.size(), 10);
  std::vector<ParameterBucket*> all;
  for (ParameterBucket& bucket : buckets) {
    bucket.shard(ranks.rank());
    all.push_back(&bucket);
  }
  ParameterGatherer gatherer(all, {*group}, {});
  const at::Tensor x = torch::ones({1, kColumns});
  const auto read = [&](size_t i) { return torch::linear(x, parameters[i].tensor).mean().item<float>() / kColumns; };

  for (size_t b = 0; b < 8; ++b) gatherer.gather(b);
  for (size_t b = 0; b < 8; ++b) gatherer.drop(b);
  EXPECT_EQ(read(8), 9.0F);
  const int64_t unit_bytes = kUnit * 4;
  {
    std::unique_ptr<Shortage> shortage;
    if (ranks.rank() == 0) shortage = std::make_unique<Shortage>(3 * unit_bytes);
    EXPECT_EQ(read(9), 10.0F);
  }
  EXPECT_TRUE(buckets[8].allocated());
  EXPECT_TRUE(buckets[9].allocated());
  EXPECT_EQ(read(8), 9.0F);
  gatherer.wait_all();
}

}  // namespace
}  // namespace ds::zero
