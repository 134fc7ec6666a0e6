// What programs do with layers, sources and groups, where a pipeline does not follow one process by itself: it trains
// alike, or says what is wrong and where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "dsengine/activation_checkpoint.h"
#include "tests/pipeline/pipeline_job.h"
#include "tests/support/borrowed.h"
#include "tests/support/thrown.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::ThrowsMessage;

constexpr int64_t kLarge =
    int64_t{1} << 20;  // elements that no ring of messages holds: the end of them waits for a receiver

void wait_until(const std::function<bool()>& holds) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(holds());
}

// Layers of Linear(8, 8) that take and return all tensors by `call`.
using Call = std::function<Tensors(torch::nn::LinearImpl&, const Tensors&)>;
LayerSpec linear_layer(const Call& call) {
  return LayerSpec::made_by(
      [] {
        auto linear = torch::nn::Linear(8, 8);
        fill_by_name(*linear, "linear");
        return linear.ptr();
      },
      [call](torch::nn::LinearImpl& linear, const Tensors& inputs) { return call(linear, inputs); });
}
LayerSpec linear_layer() {
  return linear_layer([](torch::nn::LinearImpl& linear, const Tensors& inputs) {
    Tensors outputs = inputs;
    outputs[0] = linear.forward(inputs[0]);
    return outputs;
  });
}

Job job_of(const std::vector<LayerSpec>& layers, const std::string& schedule, int stages = 2) {
  Job job{.ranks = stages, .config = config_of(stages, schedule, 1)};
  job.layers = [layers] { return layers; };
  job.options.loss = [](const Tensors& outputs, const Tensors& labels) {
    return torch::mse_loss(outputs.at(0), labels.at(0));
  };
  job.options.partition = "uniform";
  return job;
}

MicroBatch ones() { return {.inputs = {torch::ones({2, 8})}, .labels = {torch::ones({2, 8})}}; }

// Runs one batch on each rank; returns the messages of what they throw.
std::vector<std::string> messages_of(const Job& job, const BatchSource& source = ones) {
  std::vector<std::string> messages(static_cast<size_t>(job.ranks));
  run(job, [&](Rank& rank) {
    messages[static_cast<size_t>(rank.world_rank)] =
        test::thrown_by([&] { rank.engine.train_batch(source); }, /*otherwise=*/"");
  });
  return messages;
}

// What the layers of a job have seen, from several threads.
struct Seen {
  std::mutex mutex;
  std::map<int, std::vector<double>> of_layer;
  std::atomic<int> first_forwards{0};

  void note(int layer, double value) {
    const std::lock_guard lock(mutex);
    of_layer[layer].push_back(value);
  }
};

// A layer that counts its forwards in a tensor, which it sends along (or, with `of_pointer`, another tensor over the
// same memory), and notes the count that it was given.
struct CountingImpl : torch::nn::Module {
  CountingImpl(int at, std::shared_ptr<Seen> seen, bool of_pointer)
      : place(at), notes(std::move(seen)), sends_pointer(of_pointer) {
    linear = register_module("linear", torch::nn::Linear(8, 8));
    fill_by_name(*this, "counting");
  }
  Tensors forward(const Tensors& inputs) {
    count.add_(1);
    if (place == 0) ++notes->first_forwards;
    if (place > 0) notes->note(place, inputs.at(1)[-1].item<double>());
    return {linear(inputs[0]), sends_pointer ? torch::from_blob(count.data_ptr<float>(), {kLarge}) : count};
  }
  int place;
  std::shared_ptr<Seen> notes;
  bool sends_pointer;
  at::Tensor count = torch::zeros({kLarge});
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Counting);

TEST(PipelineHabits, AStageMayChangeWhatItSendsInItsNextForward) {
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "1f1b by pointer"}) {
    SCOPED_TRACE(schedule);
    const auto seen = std::make_shared<Seen>();
    const bool by_pointer = std::string(schedule).ends_with("by pointer");
    std::vector<LayerSpec> layers;
    for (int i = 0; i < 4; ++i) layers.push_back(LayerSpec::of<Counting>(i, seen, by_pointer));
    run(job_of(layers, by_pointer ? "1f1b" : schedule), [&](Rank& rank) {
      // The first stage has computed on before anybody takes its first message.
      if (rank.world_rank == 1) wait_until([&] { return seen->first_forwards >= 2; });
      rank.engine.train_batch(ones);
    });
    for (int layer = 1; layer < 4; ++layer) {
      EXPECT_THAT(seen->of_layer[layer], ElementsAre(1, 2, 3, 4)) << "layer " << layer;
    }
  }
}

// Gives a gradient in memory that it uses again.
struct KeptGradient : torch::autograd::Function<KeptGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    if (!buffer.defined()) buffer = torch::zeros_like(gradients[0]);
    buffer.add_(1);
    ++calls;
    return {buffer.detach()};
  }
  static inline at::Tensor buffer;
  static inline std::atomic<int> calls{0};
};

TEST(PipelineHabits, AFunctionMayUseTheMemoryOfItsGradientAgain) {
  KeptGradient::buffer.reset();
  KeptGradient::calls = 0;
  const auto seen = std::make_shared<Seen>();
  const std::vector<LayerSpec> layers = {linear_layer([seen](torch::nn::LinearImpl& linear, const Tensors& inputs) {
                                           const at::Tensor h = inputs[0] * linear.weight.sum();
                                           h.register_hook([seen](const at::Tensor& gradient) {
                                             wait_until([] { return KeptGradient::calls == 4; });
                                             seen->note(0, gradient[-1].item<double>());
                                           });
                                           return Tensors{h};
                                         }),
                                         linear_layer([](torch::nn::LinearImpl& linear, const Tensors& inputs) {
                                           return Tensors{KeptGradient::apply(inputs[0]).mean() * linear.weight.sum()};
                                         })};
  run(job_of(layers, "gpipe"), [&](Rank& rank) {
    rank.engine.train_batch([] { return MicroBatch{{torch::ones({kLarge})}, {torch::ones({})}}; });
  });
  EXPECT_THAT(seen->of_layer[0], ElementsAre(1, 2, 3, 4));
}

TEST(PipelineHabits, AnAliasOfWhatWasSentMayNotBeChanged) {
  for (const char* schedule : {"gpipe", "zbv"}) {
    SCOPED_TRACE(schedule);
    std::vector<LayerSpec> layers(4, linear_layer());
    const int place = schedule == std::string("gpipe") ? 0 : 1;  // sent; given to another stage of the rank
    layers[static_cast<size_t>(place)] =
        linear_layer([kept = at::Tensor()](torch::nn::LinearImpl& linear, const Tensors& inputs) mutable {
          if (kept.defined()) kept.add_(1);
          const at::Tensor h = linear.forward(inputs[0]);
          kept = h.detach();
          return Tensors{h};
        });
    if (place == 0) layers.resize(2, linear_layer());
    EXPECT_THAT(messages_of(job_of(layers, schedule))[static_cast<size_t>(place)],
                AllOf(HasSubstr("of stage "), HasSubstr("micro-batch "), HasSubstr("layer"),
                      AnyOf(AllOf(HasSubstr("changed in place"), HasSubstr("clone()")),
                            HasSubstr("modified by an inplace operation"))));
  }
}

TEST(PipelineHabits, ASourceMayFillItsMemoryAgain) {
  const auto losses_with = [](const std::string& schedule, const std::function<BatchSource(BatchSource)>& of) {
    std::vector<double> losses;
    Job job{.config = config_of(2, schedule, 1)};
    run(job, [&](Rank& rank) {
      const BatchSource source = of([&rank] { return tokens_of(rank.next++, 0); });
      for (int step = 0; step < 3; ++step) {
        const double loss = rank.engine.train_batch(source).item<double>();
        if (rank.world_rank == 0) losses.push_back(loss);
      }
    });
    return losses;
  };
  const auto one_vector = [](const BatchSource& next) {
    return [next, inputs = std::make_shared<std::vector<int64_t>>(10),
            labels = std::make_shared<std::vector<int64_t>>(10)] {
      MicroBatch batch = next();
      const auto filled = [](std::vector<int64_t>& memory, const at::Tensor& values) {
        std::copy_n(values.const_data_ptr<int64_t>(), memory.size(), memory.begin());
        return torch::from_blob(memory.data(), {2, 5}, torch::kLong);
      };
      return MicroBatch{{filled(*inputs, batch.inputs[0])}, {filled(*labels, batch.labels[0])}};
    };
  };
  const auto one_tensor = [](const BatchSource& next) {
    return [next, kept = tokens_of(0, 0)] {
      const MicroBatch batch = next();
      kept.inputs[0].copy_(batch.inputs[0]);
      kept.labels[0].copy_(batch.labels[0]);
      return kept;
    };
  };
  for (const char* schedule : {"gpipe", "zbv"}) {  // labels wait, too, where one rank has the first and the last stage
    SCOPED_TRACE(schedule);
    const std::vector<double> wanted = losses_with(schedule, [](BatchSource next) { return next; });
    EXPECT_EQ(losses_with(schedule, one_vector), wanted);
    EXPECT_EQ(losses_with(schedule, one_tensor), wanted);
  }
}

TEST(PipelineHabits, StagesThatTakeDifferentMicroBatchesAreNamed) {
  run({.ranks = 4, .config = config_of(2, "1f1b", 1)}, [](Rank& rank) {
    const double before = rank.train_step(0);
    const int data_rank = rank.engine.communicator().rank();
    // Pipeline 1 alone reads by the rank of the job.
    const auto wrong = [&] { return tokens_of(rank.next++, data_rank == 0 ? 0 : rank.world_rank); };
    rank.next = 4;
    EXPECT_THAT([&] { rank.engine.train_batch(wrong); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 1 and 3"), HasSubstr("different labels"),
                                                HasSubstr("micro-batch 0"), HasSubstr("seeded alike"),
                                                HasSubstr("Nothing was applied"))));
    EXPECT_EQ(rank.engine.global_steps(), 1);
    EXPECT_THAT([&] { rank.engine.eval_batch(wrong); }, ThrowsMessage<UsageError>(HasSubstr("ranks 1 and 3")));
    EXPECT_LT(rank.train_step(0), before);
  });
}

TEST(PipelineHabits, FloatsMayDifferByRoundingAndStagesLeaveOutWhatTheyDoNotUse) {
  run(job_of(std::vector<LayerSpec>(2, linear_layer()), "1f1b"), [](Rank& rank) {
    const bool first = rank.world_rank == 0;
    rank.engine.train_batch([&] {
      MicroBatch batch = ones();
      if (first) batch.labels[0] *= 1 + 3e-7;
      return batch;
    });
    rank.engine.train_batch([&] { return first ? MicroBatch{ones().inputs, {}} : MicroBatch{{}, ones().labels}; });
    const auto flipped = [&] {
      MicroBatch batch{.inputs = {torch::ones({2, 8})}, .labels = {torch::arange(16.0).view({2, 8})}};
      if (first) batch.labels[0] = batch.labels[0].flip(1);
      return batch;
    };
    EXPECT_THAT([&] { rank.engine.train_batch(flipped); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 0 and 1"), HasSubstr("different labels"))));
    // A dataset that adds noise to its inputs, of which the last stage reads none; an empty tensor that is left out.
    rank.engine.train_batch([&] { return MicroBatch{{ones().inputs[0] * (first ? 1.5 : 0.5)}, ones().labels}; });
    const at::Tensor none = torch::empty({0});
    rank.engine.train_batch([&] {
      return first ? MicroBatch{ones().inputs, {none}} : MicroBatch{{none}, ones().labels};
    });
  });
}

TEST(PipelineHabits, AGroupHasToMatchOnSomeStage) {
  const auto refusal = [](const std::vector<std::string>& names) {
    std::vector<std::string> messages(2);
    test::run_ranks(2, [&](comm::Communicator& world) {
      engine::ParameterGroup group;
      group.parameters = names;
      group.lr = 1e-4;
      const auto ranks = test::borrowed(world);
      const auto model = std::make_shared<PipelineModule>(layers_of(4, false), PipelineOptions{.loss = cross_entropy});
      try {
        engine::initialize(
            {.model = model, .config = config_of(2, "1f1b", 1), .parameter_groups = {group}, .communicator = ranks});
      } catch (const UsageError& error) {
        messages[static_cast<size_t>(world.rank())] = error.what();
      }
    });
    EXPECT_EQ(messages[0], messages[1]);
    return messages[0];
  };
  EXPECT_THAT(refusal({"h.0.*", "blocks.*"}),
              AllOf(HasSubstr("parameter_groups[0]: \"blocks.*\" matches no trainable parameter of any stage"),
                    HasSubstr("names look like \"embed.weight\"")));
  EXPECT_THAT(refusal({"embed.*"}), IsEmpty());
  EXPECT_THAT(refusal({"head.*"}), IsEmpty());
}

TEST(PipelineHabits, UndefinedAndSparseTensorsAreNamed) {
  for (const char* schedule : {"gpipe", "zbv"}) {
    SCOPED_TRACE(schedule);
    for (const bool sparse : {false, true}) {
      const LayerSpec layer = linear_layer([sparse](torch::nn::LinearImpl& linear, const Tensors& inputs) {
        const at::Tensor h = linear.forward(inputs[0]);
        return Tensors{h, sparse ? h.detach().to_sparse() : at::Tensor()};
      });
      EXPECT_THAT(messages_of(job_of(std::vector<LayerSpec>(4, layer), schedule))[0],
                  AllOf(HasSubstr("micro-batch 0, stage 0, layer"), HasSubstr("output 1: expected a dense tensor"),
                        HasSubstr(sparse ? "layout Sparse" : "undefined"), Not(HasSubstr("Exception raised"))));
    }
  }
  const Job job = job_of(std::vector<LayerSpec>(2, linear_layer()), "1f1b");
  EXPECT_THAT(messages_of(job,
                          [] {
                            MicroBatch batch = ones();
                            batch.inputs.emplace_back();
                            return batch;
                          })[0],
              AllOf(HasSubstr("micro-batch 0, source of stage 0: input 1 is undefined"), HasSubstr("leave it out")));
  EXPECT_THAT(messages_of(job,
                          [] {
                            MicroBatch batch = ones();
                            batch.labels.emplace_back();
                            return batch;
                          })[0],
              HasSubstr("micro-batch 0, source of stage 0: label 1 is undefined"));
}

TEST(PipelineHabits, ErrorsInBackwardAndInTheSourceHaveAPlace) {
  for (const char* schedule : {"1f1b", "zb_h1"}) {
    SCOPED_TRACE(schedule);
    std::vector<LayerSpec> layers(4, linear_layer());
    layers[2] = linear_layer([](torch::nn::LinearImpl& linear, const Tensors& inputs) {
      const at::Tensor h = linear.forward(inputs[0]);
      h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("bad gradient"); });
      return Tensors{h};
    });
    EXPECT_THAT(messages_of(job_of(layers, schedule))[1],
                AllOf(HasSubstr("micro-batch 0, backward of stage 1, layers 2 ("), HasSubstr("bad gradient")));
  }
  const Job job = job_of(std::vector<LayerSpec>(2, linear_layer()), "gpipe");
  run(job, [](Rank& rank) {
    if (rank.world_rank == 1) return;
    const auto ends = [&rank] {
      if (rank.next++ == 1) throw std::out_of_range("the file has ended");
      return ones();
    };
    try {
      rank.engine.train_batch(ends);
      ADD_FAILURE() << "the source has ended";
    } catch (const UsageError& error) {
      EXPECT_STREQ(error.what(), "micro-batch 1, source of stage 0: the file has ended");
      EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
    }
  });
  EXPECT_THAT(messages_of({.config = config_of(2, "1f1b", 1)}, [] { return MicroBatch(); })[0],
              AllOf(HasSubstr("micro-batch 0, stage 0, layer 0"), HasSubstr("the source gave no inputs"),
                    HasSubstr("at its end")));
}

// Layers whose first one computes without a graph, though its weights are trained.
std::vector<LayerSpec> first_without_graph() {
  std::vector<LayerSpec> layers(4, linear_layer());
  layers[0] = linear_layer([](torch::nn::LinearImpl& linear, const Tensors& inputs) {
    const at::NoGradGuard no_grad;
    return Tensors{linear.forward(inputs[0])};
  });
  return layers;
}

TEST(PipelineHabits, ALayerWithoutGraphMayBeRecomputed) {
  const auto losses = [](int stages, int64_t interval, int zero_stage) {
    Job job = job_of(first_without_graph(), "1f1b", stages);
    job.config = config_of(stages, "1f1b", zero_stage);
    job.config["pipeline"]["activation_checkpoint_interval"] = interval;
    std::vector<double> found;
    run(job, [&](Rank& rank) {
      for (int step = 0; step < 3; ++step) {
        const double loss = rank.engine.train_batch(ones).item<double>();
        if (rank.world_rank == 0) found.push_back(loss);
      }
    });
    return found;
  };
  for (const int zero_stage : {0, 2, 3}) {
    const std::vector<double> wanted = losses(1, 0, zero_stage);
    EXPECT_LT(wanted.back(), wanted.front());
    expect_near(losses(1, 1, zero_stage), wanted, 5e-6);
    expect_near(losses(2, 1, zero_stage), wanted, 5e-6);
  }
}

TEST(PipelineHabits, ARegionWithoutGraphNeedsNoPipeline) {
  test::run_ranks(1, [](comm::Communicator& world) {
    torch::nn::Linear first(8, 8);
    torch::nn::Linear second(8, 8);
    const torch::nn::Sequential net(first, second);
    nlohmann::json config = config_of(1, "1f1b", 1);
    config.erase("pipeline");
    config["gradient_accumulation_steps"] = 1;
    const at::Tensor before = first->weight.detach().clone();
    const auto engine =
        engine::initialize({.model = net.ptr(), .config = config, .communicator = test::borrowed(world)}).engine;
    const auto without_graph = [&](const at::Tensor& x) {
      const at::NoGradGuard no_grad;
      return first(x);
    };
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = second(recompute::checkpoint(without_graph, torch::ones({3, 8}))).pow(2).mean();
      engine->backward(loss);
      engine->step();
    }
    EXPECT_EQ(engine->global_steps(), 2);
    EXPECT_TRUE(torch::allclose(first->weight, before * std::pow(1 - 1e-3 * 0.01, 2))) << "weight decay alone";
  });
}

TEST(PipelineHabits, ABatchThatOneStageTrainsAloneTellsWhatTheOtherDidLast) {
  run({.config = config_of(2, "1f1b", 1)}, [](Rank& rank) {
    rank.train_step(0);
    if (rank.world_rank == 1) return;
    EXPECT_THAT([&] { rank.train_step(1); },
                ThrowsMessage<CommError>(AllOf(HasSubstr("rank 1"), Not(HasSubstr("began nothing yet")),
                                               HasSubstr("last began send of 160 Float 'gradient of stage 0, "))));
  });
}

}  // namespace
}  // namespace ds::pipeline
