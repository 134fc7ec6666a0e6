// A rank without memory for the next bucket: what it does about it concerns this rank alone.
#include <gmock/gmock.h>
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
#include "zero/gather/parameter_gatherer.h"

namespace ds::zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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

// While it lives, this process can map nothing until it holds `bytes` less than now (negative: no more than so many).
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

// Sharded weights, each a bucket: `count` of one unit, of which weight i holds i + 1 everywhere, and one twice as
// large.
struct Weights {
  Weights(int rank, int count) {
    std::vector<LayoutParameter> shapes;
    for (int i = 0; i <= count; ++i) {
      const int64_t elements = i == count ? 2 * kUnit : kUnit;
      parameters.push_back({cat("weight", i), torch::full({elements / kColumns, kColumns}, i + 1.0)});
      shapes.push_back({parameters.back().name, elements});
    }
    for (BucketLayout& layout : lay_out(shapes, {.world_size = 2, .max_bucket_elements = kUnit})) {
      const at::Tensor values = flatten(layout, parameters, at::kFloat);
      buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
    }
    for (ParameterBucket& bucket : buckets) {
      bucket.shard(rank);
      all.push_back(&bucket);
    }
  }
  float read(size_t i) const {
    const at::Tensor x = torch::ones({1, kColumns});
    return torch::linear(x, parameters[i].tensor).mean().item<float>() / kColumns;
  }

  std::vector<Parameter> parameters;
  std::vector<ParameterBucket> buckets;
  std::vector<ParameterBucket*> all;
};

DS_PROCESS_TEST(GatherLimit, ARankThatIsShortOfMemoryReleasesNothingThatOthersKeep, 2) {
  at::set_num_threads(1);
  const auto communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  const auto group = communicator->new_group({0, 1}, "parameters");
  // Eight buckets of one unit that fill the pool, one that stays, one of another size that does not fit it.
  Weights weights(ranks.rank(), 9);
  const std::vector<ParameterBucket>& buckets = weights.buckets;
  ASSERT_EQ(buckets.size(), 10);
  ParameterGatherer gatherer(weights.all, {*group}, {});

  for (size_t b = 0; b < 8; ++b) gatherer.held().gather(b);
  for (size_t b = 0; b < 8; ++b) gatherer.held().drop(b);
  EXPECT_EQ(weights.read(8), 9.0F);
  const int64_t unit_bytes = kUnit * 4;
  {
    std::unique_ptr<Shortage> shortage;
    if (ranks.rank() == 0) shortage = std::make_unique<Shortage>(3 * unit_bytes);
    EXPECT_EQ(weights.read(9), 10.0F);
  }
  EXPECT_TRUE(buckets[8].storage().allocated());
  EXPECT_TRUE(buckets[9].storage().allocated());
  EXPECT_EQ(weights.read(8), 9.0F);
  gatherer.wait_all();
}

// The operator has nothing to read and fails; what was missing is an error of the engine's calls. Nothing ends the
// process, and the other rank learns of it when this one has left.
DS_PROCESS_TEST(GatherLimit, ARankWithoutMemoryForABucketThrows, 2) {
  at::set_num_threads(1);
  const auto communicator = comm::make_communicator(ranks.meet(), at::kCPU);
  const auto group = communicator->new_group({0, 1}, "parameters");
  Weights weights(ranks.rank(), 2);
  ParameterGatherer gatherer(weights.all, {*group}, {});
  EXPECT_EQ(weights.read(0), 1.0F);
  if (ranks.rank() == 1) {
    EXPECT_THROW(weights.read(2), c10::Error);
    EXPECT_THROW(gatherer.begin_backward(false), CommError);
    return;
  }
  {
    const Shortage shortage(-kUnit * 4);  // half of it
    EXPECT_THROW(weights.read(2), c10::Error);
  }
  EXPECT_THROW(weights.read(1), c10::Error) << "it takes part in no gather any more";
  for (int call = 0; call < 2; ++call) {
    EXPECT_THAT([&] { gatherer.begin_backward(false); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("no memory for parameters of bucket 2 (weight2)"),
                                                 HasSubstr("stage3_max_live_parameters"))));
  }
  EXPECT_THROW(gatherer.held().gather(1), ConfigError);
}

}  // namespace
}  // namespace ds::zero
