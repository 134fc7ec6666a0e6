// Modules that fully_shard gets from elsewhere: built in parts, split already.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/fully_shard.h"
#include "dsengine/parallel.h"

#include "dsengine/zero.h"
#include "tests/loops/block_net.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSourceSteps = 5;

void expect_trains_as_torch(test::BlockNet& model, const FullyShardOptions& options, int rank) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  const auto sharded = fully_shard(model, options);
  const auto optimizer = make(sharded->parameters());
  test::train(model, *optimizer, rank, kSourceSteps);
  EXPECT_LT(test::largest_difference(sharded->full_state_dict(), test::train_plain(2, kSourceSteps, make)), 5e-6);
}

TEST(ModuleSources, BuiltInPartsByZeroInit) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    zero::Init init(test::borrowed(communicator), {.max_live = 100, .smallest = 8});
    test::BlockNet model;
    EXPECT_GT(init.held_bytes(), 0);
    expect_trains_as_torch(model, {.process_group = test::borrowed(communicator), .init = &init}, communicator.rank());
    EXPECT_EQ(init.held_bytes(), 0);
  });
}

TEST(ModuleSources, UnitsUnderZeroInitAreRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    zero::Init init(test::borrowed(communicator), {.max_live = 100, .smallest = 8});
    test::BlockNet model;
    const FullyShardOptions options{.process_group = test::borrowed(communicator), .init = &init};
    for (test::Block& block : model->blocks) fully_shard(block, options);
    EXPECT_THAT([&] { fully_shard(model, options); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("fully_shard: the unit a "), HasSubstr(".init"),
                                                 HasSubstr("Leave out the calls for modules inside"))));
  });
}

TEST(ModuleSources, SplitAlreadyIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto group = test::borrowed(communicator);
    const auto split = parallel::parallelize_module(*model, group, {{.pattern = ".*up"}});
    EXPECT_THAT([&] { fully_shard(model, {.process_group = group}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("block0.up.weight"), HasSubstr("split over ranks already"),
                                                HasSubstr("fully_shard and DistributedDataParallel take whole ones"))));
  });
}

// --- the meta device
// ----------------------------------------------------------------------------------------------------

// A module that takes no memory before fully_shard gives it some.
struct MetaSourceImpl : torch::nn::Module {
  explicit MetaSourceImpl(c10::Device device) {
    const auto options = torch::TensorOptions().device(device);
    first = register_parameter("first", torch::empty({9, 5}, options));
    frozen = register_parameter("frozen", torch::empty({9, 9}, options), /*requires_grad=*/false);
    last = register_parameter("last", torch::empty({2, 9}, options));
    scale = register_buffer("scale", torch::empty({9}, options));
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(torch::linear(torch::linear(x, first), frozen)) * scale;
    return (torch::linear(h, last) - x.narrow(1, 0, 2).sin()).pow(2).mean();
  }
  at::Tensor first, frozen, last, scale;
};
TORCH_MODULE(MetaSource);

MetaSource real_source() {
  MetaSource model(at::kCPU);
  test::fill(*model);
  model->scale.copy_(torch::linspace(0.5, 1.5, 9));
  return model;
}

std::string source_file(const test::ScratchFolder& folder) {
  const MetaSource model = real_source();
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : model->named_parameters()) tensors.emplace_back(item.key(), item.value().detach());
  for (const auto& item : model->named_buffers()) tensors.emplace_back(item.key(), item.value());
  const std::string path = (folder.path() / "weights.safetensors").string();
  write_safetensors(path, tensors);
  return path;
}

TEST(ModuleSources, MetaWithADeviceAndWeightsTrainsAsTorch) {
  const test::ScratchFolder folder;
  const std::string path = source_file(folder);
  const test::MakeOptimizer make = test::optimizers()[2].second;
  MetaSource plain = real_source();
  const auto adamw = make({plain->first, plain->last});
  for (int step = 0; step < kSourceSteps; ++step) {
    adamw->zero_grad();
    plain->loss(test::joined_batch(step, 2)).backward();
    adamw->step();
  }
  test::NamedValues expected;
  for (const auto& item : plain->named_parameters()) expected.emplace_back(item.key(), item.value().detach());
  for (const auto& item : plain->named_buffers()) expected.emplace_back(item.key(), item.value());
  for (const bool reshards : {true, false}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      MetaSource model(at::kMeta);
      const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator),
                                               .reshard_after_forward = reshards,
                                               .device = "cpu",
                                               .weights = path});
      const auto optimizer = make(sharded->parameters());
      for (int step = 0; step < kSourceSteps; ++step) {
        model->loss(test::batch_of(step, communicator.rank())).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), 5e-6);
    });
  }
}

TEST(ModuleSources, MetaWithoutADeviceOrWeightsIsRefusedByName) {
  const test::ScratchFolder folder;
  const std::string path = source_file(folder);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    MetaSource model(at::kMeta);
    EXPECT_THAT([&] { fully_shard(model, {.process_group = test::borrowed(communicator), .weights = path}); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("fully_shard: the module is on the meta device"),
                                                 HasSubstr("expected .device"), HasSubstr("found no .device"),
                                                 HasSubstr("without units"))));
    MetaSource other(at::kMeta);
    EXPECT_THAT([&] { fully_shard(other, {.process_group = test::borrowed(communicator), .device = "cpu"}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("meta"), HasSubstr("weights"))));
  });
}

}  // namespace
}  // namespace ds
