// Keys that nobody has thought of together: configs are drawn at random, and whatever they say, training is plain
// torch's on the joined batch, or an error names one of their keys.
//
// DS_RANDOM_CONFIGS=COUNT[:FIRST] draws more of them, from another seed on; what fails names its seed and config.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "config/plan/plan.h"
#include "core/check.h"
#include "tests/model/offloaded/offload_run.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr int kRandomSteps = 6;
constexpr int kSavedStep = 3;

// A weight that is used twice, one that only every other micro-batch uses, one that never is, and one that is frozen.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 11));
    shared = register_module("shared", torch::nn::Linear(11, 11));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({11})));
    sometimes = register_module("sometimes", torch::nn::Linear(11, 11));
    never = register_module("never", torch::nn::Linear(5, 3));
    frozen = register_module("frozen", torch::nn::Linear(11, 11));
    last = register_module("last", torch::nn::Linear(11, 3));
    fill(*this);
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor loss(const at::Tensor& input, int64_t micro_batch) {
    const at::Tensor x = input.to(first->weight.scalar_type());
    at::Tensor h = torch::tanh(shared(torch::tanh(first(x))));
    h = norm(shared(h) + frozen(h));
    if (micro_batch % 2 == 1) h = h + torch::tanh(sometimes(h));
    return (last(torch::tanh(h)) - x.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, shared{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear sometimes{nullptr}, never{nullptr}, frozen{nullptr}, last{nullptr};
};
TORCH_MODULE(OddNet);

class Draws {
 public:
  explicit Draws(uint64_t seed) : engine_(seed) {}
  bool once_in(int count) { return below(count) == 0; }
  int below(int count) { return static_cast<int>(engine_() % static_cast<uint64_t>(count)); }
  template <class T>
  T one_of(const std::vector<T>& values) {
    return values[static_cast<size_t>(below(static_cast<int>(values.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

// What decides the numbers; all else may not change them.
struct Arithmetic {
  int world = 1;
  int accumulation = 1;
  std::string optimizer = "AdamW";
  double clip = 0;
  bool sums = false;      // over ranks, in place of the mean
  std::string precision;  // empty: float32
};

// What a program does beside its loop.
struct Habits {
  bool evaluates = false;  // between steps
  bool reads_parameters = false;
  bool drops_a_pass = false;  // zero_grad() after a backward
  bool own_scopes = false;    // no_sync() around all micro-batches but the last
};

Arithmetic draw_arithmetic(Draws& draws) {
  Arithmetic drawn;
  drawn.world = 1 + draws.below(4);
  drawn.accumulation = 1 + draws.below(3);
  drawn.precision = draws.one_of<std::string>({"", "", "", "bf16", "fp16"});
  // Of 16 bits only what moves weights by their gradients' size: Adam's step of one that is nearly zero has any sign.
  drawn.optimizer = drawn.precision.empty()
                        ? draws.one_of<std::string>({"AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon", "RAdam"})
                        : "SGD";
  drawn.clip = draws.one_of<double>({0.0, 0.5});
  drawn.sums = draws.once_in(5);
  return drawn;
}

bool is_of_torch(const std::string& optimizer) {
  return optimizer == "AdamW" || optimizer == "SGD" || optimizer == "Adagrad";
}

ordered_json optimizer_section(const std::string& type) {
  if (type == "SGD") return {{"type", type}, {"params", {{"lr", 0.02}, {"momentum", 0.9}, {"weight_decay", 0.01}}}};
  if (!is_of_torch(type)) return {{"type", type}, {"params", {{"lr", 0.002}, {"weight_decay", 0.01}}}};
  if (type == "Adagrad") return {{"type", type}, {"params", {{"lr", 0.02}, {"weight_decay", 0.01}}}};
  return {{"type", type}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}};
}

ordered_json draw_config(Draws& draws, const Arithmetic& of) {
  ordered_json config = {{"train_micro_batch_size_per_gpu", 4},
                         {"gradient_accumulation_steps", of.accumulation},
                         {"gradient_clipping", of.clip},
                         {"log_level", "error"},
                         {"check_replicas", 1},  // finds nothing, whatever else is drawn
                         {"checkpoint", {{"durable", false}}},
                         {"zero_allow_untested_optimizer", true},
                         {"optimizer", optimizer_section(of.optimizer)}};
  if (of.sums) config["gradient_allreduce_op"] = "sum";
  if (!of.precision.empty()) config[of.precision]["enabled"] = true;
  if (of.precision == "fp16") config["fp16"]["loss_scale"] = 128;
  ordered_json& zero = config["zero_optimization"];
  const int stage = draws.below(4);
  zero["stage"] = stage;
  if (draws.once_in(2)) zero["reduce_bucket_size"] = draws.one_of<int>({1, 40, 150, 500});
  if (draws.once_in(3)) zero["overlap_comm"] = draws.once_in(2);
  if (draws.once_in(4)) zero["contiguous_gradients"] = false;
  if (draws.once_in(4)) zero["round_robin_gradients"] = true;
  if (stage == 3) {
    if (draws.once_in(2)) zero["stage3_param_persistence_threshold"] = draws.one_of<int>({0, 12, 10000});
    if (draws.once_in(2)) zero["stage3_max_reuse_distance"] = draws.one_of<int>({0, 100});
    if (draws.once_in(2)) zero["stage3_max_live_parameters"] = draws.one_of<int>({0, 150, 1000});
    if (draws.once_in(2)) zero["stage3_prefetch_bucket_size"] = draws.one_of<int>({0, 130, 1000});
    if (draws.once_in(3)) zero["offload_param"] = draws.once_in(2) ? on_host() : on_disk();
    if (of.world % 2 == 0 && draws.once_in(4)) zero["zero_hpz_partition_size"] = 2;
  }
  if (stage > 0 && of.world % 2 == 0 && draws.once_in(4)) zero["mics_shard_size"] = draws.one_of<int>({1, 2});
  if (stage > 0 && draws.once_in(2)) {
    ordered_json place = draws.once_in(2) ? on_host() : on_disk();
    if (draws.once_in(3)) place["ratio"] = draws.one_of<double>({0.0, 0.4, 0.8});
    if (draws.once_in(3)) place["super_offload"] = true;
    if (draws.once_in(3)) place["pipeline_read"] = true;
    if (draws.once_in(3)) place["pipeline_write"] = true;
    zero["offload_optimizer"] = place;
  }
  if (draws.once_in(4)) config["prescale_gradients"] = true;
  if (draws.once_in(4)) config["gradient_predivide_factor"] = 2.0;
  if (draws.once_in(4)) config["communication_data_type"] = "fp32";
  if (!of.precision.empty() && draws.once_in(3)) config["data_types"]["grad_accum_dtype"] = "fp32";
  if (draws.once_in(4))
    config["activation_checkpointing"] = {{"modules", {draws.one_of<std::string>({"^shared$", "norm"})}}};
  if (draws.once_in(5)) config["locate_non_finite"] = true;
  if (draws.once_in(5)) config["wall_clock_breakdown"] = true;
  return config;
}

Habits draw_habits(Draws& draws) {
  return {.evaluates = draws.once_in(3),
          .reads_parameters = draws.once_in(3),
          .drops_a_pass = draws.once_in(4),
          .own_scopes = draws.once_in(4)};
}

std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const std::string& type, const std::vector<at::Tensor>& of) {
  if (type == "SGD")
    return std::make_unique<torch::optim::SGD>(of, torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.01));
  if (type == "Adagrad")
    return std::make_unique<torch::optim::Adagrad>(of, torch::optim::AdagradOptions(0.02).weight_decay(0.01));
  return std::make_unique<torch::optim::AdamW>(of, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
}

struct Outcome {
  std::vector<double> losses;  // of each micro-batch, the mean over ranks
  State weights;
};

Outcome plain_training(const Arithmetic& of) {
  OddNet model;
  std::vector<at::Tensor> trained;
  for (at::Tensor& parameter : model->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  const auto optimizer = plain_optimizer(of.optimizer, trained);
  Outcome outcome;
  const double parts = of.accumulation * (of.sums ? 1.0 : static_cast<double>(of.world));
  for (int64_t step = 0; step < kRandomSteps; ++step) {
    // A parameter without a gradient is one whose gradient is zero: momentum and decay go on.
    for (at::Tensor& parameter : trained) parameter.mutable_grad() = torch::zeros_like(parameter);
    for (int64_t micro = step * of.accumulation; micro < (step + 1) * of.accumulation; ++micro) {
      double sum = 0;
      for (int rank = 0; rank < of.world; ++rank) {
        const at::Tensor loss = model->loss(sample(micro, rank), micro);
        (loss / parts).backward();
        sum += loss.item<double>();
      }
      outcome.losses.push_back(sum / of.world);
    }
    if (of.clip > 0) torch::nn::utils::clip_grad_norm_(trained, of.clip);
    optimizer->step();
  }
  outcome.weights = parameters_of(*model);
  return outcome;
}

void train_steps(Engine& engine, OddNet& model, const Arithmetic& of, const Habits& habits, int from, int to,
                 std::vector<double>& losses) {
  const int rank = engine.global_rank();
  for (int64_t step = from; step < to; ++step) {
    if (habits.drops_a_pass && step % 2 == 1) {
      engine.backward(model->loss(sample(99, rank), 1) * 7.0);
      engine.zero_grad();
    }
    for (int64_t micro = step * of.accumulation; micro < (step + 1) * of.accumulation; ++micro) {
      std::optional<Engine::NoSync> scope;
      if (habits.own_scopes && micro + 1 < (step + 1) * of.accumulation) scope.emplace(engine);
      const at::Tensor loss = model->loss(sample(micro, rank), micro);
      engine.backward(loss);
      losses.push_back(loss.item<double>());
      scope.reset();
      engine.step();
    }
    if (habits.evaluates) {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(model->loss(sample(step, rank), step).isfinite().item<bool>());
    }
    if (habits.reads_parameters) {
      const auto whole = engine.gathered_parameters(model->parameters());
      EXPECT_TRUE(model->last->weight.isfinite().all().item<bool>());
    }
  }
}

// Of rank 0; the mean of losses of all ranks.
struct RandomRun {
  Outcome outcome;
  std::string refusal;  // else: what initialize() threw
};

RandomRun engine_training(const Arithmetic& of, const ordered_json& first, const ordered_json& second,
                          const Habits& habits) {
  const test::ScratchFolder folder;
  RandomRun run;
  std::mutex mutex;
  run_ranks(of.world, [&](comm::Communicator& communicator) {
    std::vector<double> losses;
    State weights;
    try {
      for (const bool again : {false, true}) {
        OddNet model;
        if (again) {
          const torch::NoGradGuard no_grad;
          for (at::Tensor& parameter : model->parameters()) parameter.fill_(0.125);
        }
        const auto engine = start(model.ptr(), again ? second : first, communicator).engine;
        if (again) engine->load_checkpoint(folder.path().string(), "tag");
        train_steps(*engine, model, of, habits, again ? kSavedStep : 0, again ? kRandomSteps : kSavedStep, losses);
        if (!again) engine->save_checkpoint(folder.path().string(), "tag");
        weights = copy_of(engine->fp32_state_dict());
      }
    } catch (const ConfigError& error) {
      const std::lock_guard lock(mutex);
      run.refusal = error.what();
      return;
    }
    const at::Tensor means = torch::tensor(losses, torch::kDouble);
    if (of.world > 1) communicator.all_reduce(means, comm::ReduceOp::kAvg).wait();
    if (communicator.rank() != 0) return;
    const std::lock_guard lock(mutex);
    run.outcome.weights = weights;
    for (int64_t i = 0; i < means.numel(); ++i) run.outcome.losses.push_back(means[i].item<double>());
  });
  return run;
}

// A key of the config that the text names.
bool names_a_key(const std::string& text, const ordered_json& config) {
  for (const auto& item : config.items()) {
    if (text.find(item.key()) != std::string::npos) return true;
    if (item.value().is_object() && names_a_key(text, item.value())) return true;
  }
  return false;
}

// What makes a plan refuse the config; empty: nothing does.
std::string refusal_of(const ordered_json& config, int world) {
  try {
    std::ignore = make_plan(config::parse(config, {.dp_world_size = world}), {.world_size = world, .dp = world});
    return {};
  } catch (const ConfigError& error) {
    return error.what();
  }
}

// A config that a plan can be made of. Draws that are refused on the way have to name a key.
ordered_json draw_valid_config(Draws& draws, const Arithmetic& of) {
  for (int tries = 0; tries < 50; ++tries) {
    ordered_json config = draw_config(draws, of);
    const std::string refusal = refusal_of(config, of.world);
    if (refusal.empty()) return config;
    EXPECT_TRUE(names_a_key(refusal, config)) << config.dump() << "\n" << refusal;
  }
  ADD_FAILURE() << "no draw of 50 was valid";
  return small_config(1, of.accumulation);
}

// Of trained parameters only: what is frozen stays as it is, in the dtype that it was cast to.
void expect_same_training(const Outcome& found, const Outcome& expected, bool exact) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    const double tolerance = exact ? 1e-5 : 0.05;
    EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * std::max(1.0, expected.losses[i]))
        << "micro-batch " << i;
  }
  for (const auto& [name, values] : found.weights) {
    const double difference = (values.to(torch::kDouble) - expected.weights.at(name)).abs().max().item<double>();
    EXPECT_LT(difference, exact ? 1e-4 : 0.05) << name;
  }
}

// What others are compared with: torch, or, of optimizers that are compared with theirs elsewhere, the engine at its
// simplest.
Outcome reference(const Arithmetic& of) {
  if (is_of_torch(of.optimizer)) return plain_training(of);
  ordered_json config = {{"train_micro_batch_size_per_gpu", 4},   {"gradient_accumulation_steps", of.accumulation},
                         {"gradient_clipping", of.clip},          {"log_level", "error"},
                         {"zero_allow_untested_optimizer", true}, {"optimizer", optimizer_section(of.optimizer)}};
  if (of.sums) config["gradient_allreduce_op"] = "sum";
  return engine_training(of, config, config, {}).outcome;
}

TEST(RandomConfigs, TrainAsTorchOrAreRefusedByName) {
  int count = 40;
  uint64_t first_seed = 1;
  if (const char* const asked = std::getenv("DS_RANDOM_CONFIGS")) {
    const std::string text = asked;
    count = std::stoi(text);
    if (const size_t colon = text.find(':'); colon != std::string::npos)
      first_seed = std::stoull(text.substr(colon + 1));
  }
  int trained = 0;
  for (uint64_t seed = first_seed; seed < first_seed + static_cast<uint64_t>(count); ++seed) {
    Draws draws(seed);
    const Arithmetic arithmetic = draw_arithmetic(draws);
    const ordered_json first = draw_valid_config(draws, arithmetic);
    const ordered_json second = draw_valid_config(draws, arithmetic);
    const Habits habits = draw_habits(draws);
    SCOPED_TRACE(cat("seed ", seed, ", ", arithmetic.world, " ranks: ", first.dump(), "\nresumed with ", second.dump(),
                     "\nevaluates ", habits.evaluates, ", reads ", habits.reads_parameters, ", drops ",
                     habits.drops_a_pass, ", no_sync ", habits.own_scopes));
    const RandomRun run = engine_training(arithmetic, first, second, habits);
    if (!run.refusal.empty()) {
      EXPECT_TRUE(names_a_key(run.refusal, first) || names_a_key(run.refusal, second)) << run.refusal;
      std::cout << "seed " << seed << " is refused: " << run.refusal << '\n';
      continue;
    }
    ++trained;
    expect_same_training(run.outcome, reference(arithmetic), arithmetic.precision.empty());
    if (HasFailure()) return;
  }
  EXPECT_GE(trained, count * 3 / 4);  // what no plan sees is the exception
}

}  // namespace
}  // namespace ds::engine
