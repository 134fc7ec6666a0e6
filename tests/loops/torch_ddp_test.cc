// The loops of torch_ddp.py against what Python's torch DistributedDataParallel made of them (torch_ddp.json).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/distributed_data_parallel.h"
#include "tests/loops/replicas.h"
#include "tests/loops/torch_values.h"

namespace ds::torch_ddp {
namespace {

using test::batch_of;
using test::gradients_of;
using test::loss_of;
using test::Toy;
using test::values_of;

constexpr double kTolerance = 5e-6;

const nlohmann::json& reference() {
  static const nlohmann::json kAll = test::recorded("torch_ddp");
  return kAll;
}

void expect_as_torch(const std::vector<at::Tensor>& found, const nlohmann::json& wanted, const std::string& where) {
  test::expect_as_torch(found, wanted, kTolerance, where);
}

TEST(TorchDdp, FiveOptimizersFiftySteps) {
  for (const auto& [name, make] : test::optimizers()) {
    const nlohmann::json& wanted = reference().at("optimizers").at(name);
    test::run_ranks(2, [&, &name = name, &make = make](comm::Communicator& group) {
      Toy model;
      DistributedDataParallel ddp(model, test::small_buckets(group));
      const auto optimizer = make(model->parameters());
      for (int step = 0; step < 50; ++step) {
        optimizer->zero_grad();
        loss_of(ddp(batch_of(group.rank(), step))).backward();
        optimizer->step();
      }
      expect_as_torch(values_of(*model), wanted, name);
    });
  }
}

TEST(TorchDdp, JoinOfUnevenRanks) {
  constexpr std::array<int, 3> kBatches = {3, 8, 5};
  for (const bool by_world : {true, false}) {
    const nlohmann::json& wanted = reference().at("join").at(by_world ? "true" : "false");
    test::run_ranks(3, [&](comm::Communicator& group) {
      Toy model;
      DistributedDataParallel ddp(model, test::small_buckets(group));
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      ddp.join(
          [&] {
            for (int step = 0; step < kBatches[static_cast<size_t>(group.rank())]; ++step) {
              optimizer.zero_grad();
              loss_of(ddp(batch_of(group.rank(), step))).backward();
              optimizer.step();
            }
          },
          {.divide_by_initial_world_size = by_world});
      expect_as_torch(values_of(*model), wanted, by_world ? "over all ranks" : "over those with batches");
    });
  }
}

TEST(TorchDdp, GradientsOfUnusedParametersAndUnderNoSync) {
  const std::vector<std::array<const char*, 2>> ways = {
      {"left", "left"}, {"left", "right"}, {"right", "right"}, {"both", "left"}};
  const nlohmann::json& wanted = reference().at("unused");
  for (const bool views : {true, false}) {
    test::run_ranks(2, [&](comm::Communicator& group) {
      Toy model;
      auto options = test::small_buckets(group);
      options.find_unused_parameters = true;
      options.gradient_as_bucket_view = views;
      DistributedDataParallel ddp(model, options);
      const auto backward = [&](int step, const char* way) {
        loss_of(ddp(batch_of(group.rank(), step), way)).backward();
      };
      for (size_t step = 0; step < ways.size(); ++step) {
        backward(static_cast<int>(step), ways[step][static_cast<size_t>(group.rank())]);
        expect_as_torch(gradients_of(*model), wanted[step], "pass " + std::to_string(step));
      }
      {
        const auto scope = ddp.no_sync();
        backward(4, "both");
      }
      backward(5, "both");
      expect_as_torch(gradients_of(*model), wanted[4], "after no_sync()");
    });
  }
}

}  // namespace
}  // namespace ds::torch_ddp
