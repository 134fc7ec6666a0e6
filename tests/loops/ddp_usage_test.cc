// What DistributedDataParallel refuses, by name, and what a rank is told when another one leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/device_mesh.h"
#include "dsengine/distributed_data_parallel.h"
#include "dsengine/engine.h"
#include "dsengine/errors.h"
#include "dsengine/initialize.h"
#include "tests/loops/replicas.h"

namespace ds::ddp_usage {
namespace {

using test::batch_of;
using test::expect_close;
using test::gradients_of;
using test::loss_of;
using test::shared;
using test::Toy;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

template <class Error, class Body>
void expect_error(const Body& body, const std::string& text) {
  EXPECT_THAT([&] { body(); }, ThrowsMessage<Error>(HasSubstr(text)));
}

TEST(DdpUsage, OneWrapperOrEngineForAModule) {
  test::run_ranks(1, [](comm::Communicator& group) {
    Toy model;
    {
      DistributedDataParallel ddp(model, {.process_group = shared(group)});
      expect_error<UsageError>([&] { DistributedDataParallel again(model, {.process_group = shared(group)}); },
                               "first.weight: belongs to another engine, or to a wrapper");
      const nlohmann::json config = {{"train_batch_size", 1}, {"optimizer", {{"type", "Adam"}}}};
      expect_error<UsageError>(
          [&] { engine::initialize({.model = model.ptr(), .config = config, .communicator = shared(group)}); },
          "belongs to another engine, or to a wrapper");
    }
    DistributedDataParallel next(model, {.process_group = shared(group)});
    loss_of(next(batch_of(0, 0))).backward();
    EXPECT_TRUE(model->first->weight.grad().defined());
  });
}

// The types of members of a class that makes its wrapper later, of a holder and of a shared_ptr.
struct Trainer {
  Toy net;
  std::optional<DistributedDataParallel<Toy>> ddp;
  std::optional<DistributedDataParallel<std::shared_ptr<test::ToyImpl>>> of_pointer;
};

TEST(DdpUsage, IsAMemberOfAClassThatMakesItLater) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Trainer trainer;
    trainer.ddp.emplace(trainer.net, DistributedDataParallelOptions{.process_group = shared(group)});
    loss_of((*trainer.ddp)(batch_of(group.rank(), 0))).backward();
    const std::vector<at::Tensor> once = gradients_of(*trainer.net);
    trainer.ddp.reset();
    trainer.net->zero_grad();
    trainer.of_pointer.emplace(trainer.net.ptr(), test::small_buckets(group));
    loss_of(trainer.of_pointer->forward(batch_of(group.rank(), 0))).backward();
    expect_close(gradients_of(*trainer.net), once, 1e-6, "by either type");
    Toy alone;
    for (int rank = 0; rank < 2; ++rank) (loss_of(alone->forward(batch_of(rank, 0))) / 2).backward();
    expect_close(once, gradients_of(*alone), 1e-6, "as one process");
  });
}

TEST(DdpUsage, OptionsAreChecked) {
  test::run_ranks(1, [](comm::Communicator& group) {
    const auto refused = [&](DistributedDataParallelOptions options, const std::string& text) {
      options.process_group = shared(group);
      Toy model;
      expect_error<UsageError>([&] { DistributedDataParallel ddp(model, options); }, text);
    };
    refused({.bucket_cap_mb = 0}, ".bucket_cap_mb: expected a number above 0, found 0");
    refused({.first_bucket_mb = -1}, ".first_bucket_mb: expected a number above 0, found -1");
    refused({.device_ids = {0, 1}}, ".device_ids: expected one device, found 2");
    refused({.device_ids = {0}}, "expected the module on cuda:0, found first.weight");
    expect_error<UsageError>(
        [&] { DistributedDataParallel ddp(std::shared_ptr<test::ToyImpl>(), {.process_group = shared(group)}); },
        "null");
    torch::nn::Linear frozen(2, 2);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    expect_error<UsageError>([&] { DistributedDataParallel ddp(frozen, {.process_group = shared(group)}); },
                             "at least one trainable parameter");
  });
}

TEST(DdpUsage, RanksWithOtherModelsOrOptionsAreTold) {
  test::run_ranks(2, [](comm::Communicator& group) {
    {
      Toy model(group.rank() == 0 ? 9 : 8);
      expect_error<CommError>([&] { DistributedDataParallel ddp(model, {.process_group = shared(group)}); },
                              "first.weight: Float [9, 7] on rank 0, Float [8, 7] on rank 1");
    }
    {
      Toy model;
      if (group.rank() == 1) model->register_buffer("extra", torch::zeros({3}));
      expect_error<CommError>([&] { DistributedDataParallel ddp(model, {.process_group = shared(group)}); },
                              "buffer extra: nothing on rank 0, Float [3] on rank 1; start all ranks with the same "
                              "options of DistributedDataParallel");
    }
    Toy model;
    const DistributedDataParallelOptions options{.process_group = shared(group),
                                                 .find_unused_parameters = group.rank() == 1};
    expect_error<CommError>([&] { DistributedDataParallel ddp(model, options); }, ".find_unused_parameters");
  });
}

TEST(DdpUsage, ParametersStayThoseOfTheStart) {
  test::run_ranks(2, [](comm::Communicator& group) {
    const auto run = [&](const std::function<void(Toy&)>& change, const std::string& text) {
      Toy model;
      model->right->bias.set_requires_grad(false);
      DistributedDataParallel ddp(model, test::small_buckets(group));
      loss_of(ddp(batch_of(group.rank(), 0))).backward();
      change(model);
      const at::Tensor x = batch_of(group.rank(), 0).to(model->first->weight.dtype());
      expect_error<UsageError>([&] { loss_of(ddp(x)).backward(); }, text);
    };
    run([](Toy& model) { model->register_parameter("more", torch::ones({2})); },
        "some were added, removed or replaced");
    run(
        [](Toy& model) {
          model->last->weight = model->last->register_parameter("weight2", torch::ones({2, 5}));
        },
        "some were added, removed or replaced");
    run([](Toy& model) { model->right->bias.set_requires_grad(true); }, "right.bias requires a gradient, and did not");
    run([](Toy& model) { model->to(torch::kDouble); }, "first.weight: expected float on cpu, as it was when");
  });
}

TEST(DdpUsage, ARankThatLeavesIsNamed) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    loss_of(ddp(batch_of(group.rank(), 0))).backward();
    if (group.rank() == 1) return;
    expect_error<CommError>([&] { loss_of(ddp(batch_of(0, 1))).backward(); }, "rank 1");
  });
}

TEST(DdpUsage, BackwardTwiceWithoutForwardIsTorchsErrorAndTrainingGoesOn) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Toy model;
    DistributedDataParallel ddp(model, test::small_buckets(group));
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank(), 0)));
    loss.backward();
    const std::vector<at::Tensor> once = gradients_of(*model);
    expect_error<c10::Error>([&] { loss.backward(); }, "second time");
    ddp->zero_grad();
    loss_of(ddp(batch_of(group.rank(), 0))).backward();
    expect_close(gradients_of(*model), once, 1e-6, "afterwards");
  });
}

TEST(DdpUsage, OverAnAxisOfAMesh) {
  test::run_ranks(4, [](comm::Communicator& world) {
    comm::NamedMesh mesh = comm::init_device_mesh(shared(world), {2, 2}, {"dp", "tp"});
    Toy model;
    DistributedDataParallel ddp(model, {.process_group = mesh["dp"]});
    loss_of(ddp(batch_of(world.rank(), 0))).backward();
    Toy alone;
    const int place = world.rank() % 2;
    for (const int rank : {place, place + 2}) (loss_of(alone->forward(batch_of(rank, 0))) / 2).backward();
    expect_close(gradients_of(*model), gradients_of(*alone), 1e-6, "mean over the axis");
  });
}

TEST(DdpUsage, TwoModelsOfOneLoss) {
  test::run_ranks(2, [](comm::Communicator& group) {
    Toy generator;
    Toy judge(7);
    const auto forward = [](Toy made, Toy judged, const at::Tensor& x) {
      return loss_of(judged->forward(torch::cat({made->forward(x), x.narrow(1, 0, 5)}, 1)));
    };
    DistributedDataParallel first(generator, test::small_buckets(group));
    DistributedDataParallel second(judge, test::small_buckets(group));
    forward(generator, judge, batch_of(group.rank(), 0)).backward();
    Toy alone;
    Toy judge_alone(7);
    for (int rank = 0; rank < 2; ++rank) (forward(alone, judge_alone, batch_of(rank, 0)) / 2).backward();
    expect_close(gradients_of(*generator), gradients_of(*alone), 1e-6, "generator");
    expect_close(gradients_of(*judge), gradients_of(*judge_alone), 1e-6, "judge");
  });
}

}  // namespace
}  // namespace ds::ddp_usage
