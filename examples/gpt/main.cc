// Trains a byte-level GPT. The whole job is in the ds_config: one process or many, ZeRO stage, precision.
//
//   ds-launch --num_procs 2 gpt --deepspeed_config configs/zero2.json
#include <dsengine/checkpoint.h>
#include <dsengine/efficiency.h>
#include <dsengine/engine.h>
#include <dsengine/launch.h>
#include <dsengine/sequence_parallel.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "gpt2_names.h"
#include "gpt_init.h"
#include "gpt_layers.h"
#include "gpt_model.h"
#include "gpt_options.h"
#include "metrics_file.h"
#include "run_checkpoints.h"
#include "run_pipeline.h"
#include "text_corpus.h"
#include "text_sampler.h"
#include "token_batches.h"
#include "training_log.h"
#include "whole_file.h"

namespace gpt {
namespace {

// Before the engine knows the ranks, the environment of ds-launch, mpirun or srun does. One process alone has none.
bool is_first_rank() {
  std::vector<const char*> names = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"};
  if (std::getenv("SLURM_STEP_NUM_TASKS") != nullptr) names.push_back("SLURM_PROCID");
  for (const char* name : names) {
    if (const char* rank = std::getenv(name)) return std::string_view(rank) == "0";
  }
  return true;
}

// Throws ds::IoError when `file` cannot be written there.
void probe(const std::string& folder, const char* file) {
  std::error_code failure;  // what it means for the file is said next
  std::filesystem::create_directories(folder, failure);
  WholeFile probed((std::filesystem::path(folder) / file).string());
}

// Opens the metrics, and finds out whether the weights can be saved, before hours of training rather than after.
std::unique_ptr<MetricsFile> open_outputs(const GptOptions& options) {
  if (!is_first_rank()) return nullptr;
  if (options.save) WholeFile probed(*options.save);
  if (options.export_hf) probe(*options.export_hf, "config.json");
  if (options.save_checkpoint) probe(*options.save_checkpoint, "latest");
  if (!options.metrics) return nullptr;
  return std::make_unique<MetricsFile>(*options.metrics, /*append=*/options.load_checkpoint.has_value());
}

std::shared_ptr<Gpt> make_model(const GptOptions& options) {
  auto model = std::make_shared<Gpt>(options.model);
  if (options.load_hf) {
    load_gpt2_weights(*model, *options.load_hf);
  } else if (options.init) {
    load_weights(*model, *options.init);
  } else {
    initialize_weights(*model, options.seed);
  }
  return model;
}

// A flag that the ds_config has its own number for would change nothing.
void require_used(const ds::engine::Engine& engine, ds::engine::config::AutoValues values) {
  values.total_num_steps.reset();
  const auto unused = ds::engine::config::unused_auto_values(engine.config(), values);
  require<ds::ConfigError>(unused.empty(), "a flag gives ", unused.empty() ? std::string() : unused.front(),
                           ", for which the ds_config has its own value; write \"auto\" there, or remove the flag");
}

BatchOptions batch_options(const GptOptions& options, const std::shared_ptr<ds::engine::Engine>& of,
                           const TextCorpus& corpus) {
  const ds::engine::Engine& engine = *of;
  const bool chosen = engine.config().data_efficiency.chooses_samples();
  return {.order = options.order,
          .batch_size = engine.train_micro_batch_size_per_gpu(),
          .seq_len = options.seq_len,
          .vocab = options.model.vocab,
          .rank = engine.communicator().rank(),
          .world_size = engine.dp_world_size(),
          .seed = options.seed,
          .device = engine.device(),
          .curriculum = ds::engine::curriculum(of),
          .sampler = chosen ? ds::engine::data_sampler(of, sequences_of(corpus, options.seq_len)) : nullptr};
}

void print_start(const GptConfig& model, const TextCorpus& corpus, const ds::engine::Engine& engine) {
  if (engine.global_rank() != 0) return;
  std::cout << "GPT of " << parameter_count(model) << " parameters on " << engine.world_size() << " x "
            << engine.device() << (engine.is_pipe_parallel() ? cat(", ", engine.pipe_parallel_size(), " stages") : "")
            << ", ZeRO stage " << engine.zero_optimization_stage() << ", " << engine.train_batch_size()
            << " sequences a step; text: " << corpus.path() << " (" << corpus.file_count() << " files, "
            << corpus.size() << " bytes)" << std::endl;
}

void save_weights(ds::engine::Engine& engine, const GptOptions& options) {
  if (!options.save && !options.export_hf) return;
  const auto weights = engine.fp32_state_dict();
  if (engine.global_rank() != 0) return;
  if (options.save) ds::checkpoint::write_weights(*options.save, weights);
  if (options.export_hf) export_gpt2(options.model, weights, *options.export_hf);
}

void print_sample(ds::engine::Engine& engine, const Logits& logits, const GptOptions& options) {
  engine.eval();
  const std::string text =
      sample_text(logits, options.model, engine.device(), "\n", {.length = options.generate, .seed = options.seed});
  if (engine.global_rank() == 0) std::cout << "--- a sample of what it learned ---" << printable(text) << std::endl;
}

// Returns the loss of the whole sequences, of which each rank has an addend.
at::Tensor whole_loss(const at::Tensor& loss, ds::comm::Communicator& ranks) {
  if (ranks.size() == 1) return loss;
  const at::Tensor whole = loss.detach().clone();
  ranks.all_reduce(whole, ds::comm::ReduceOp::kSum, "loss of the sequences").wait();
  return whole;
}

// Up to --steps in all; false when it ends before, to be started again.
bool train_steps(const std::shared_ptr<ds::engine::Engine>& of, Gpt& model, const GptOptions& options,
                 TokenBatches& batches, RunCheckpoints& checkpoints, MetricsFile* metrics) {
  ds::engine::Engine& engine = *of;
  const auto sequence = std::make_shared<const ds::engine::SequenceParallel>(of);
  if (sequence->size() > 1) model.cut_sequences(sequence);
  TrainingLog log(engine, options, metrics);
  const int64_t micro_batch = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size();
  int64_t accumulated = 0;  // sequences of the running accumulation, over all ranks
  bool restarts = false;
  while (engine.global_steps() < options.steps && !restarts) {
    const int64_t first = engine.global_samples() + accumulated;
    const TokenBatch batch = batches.get(first);
    engine.name_batch(batches.name(first));
    const at::Tensor loss = model.forward(batch.data, batch.target);
    engine.backward(loss);
    engine.step();
    accumulated += micro_batch;
    if (!log.after_micro_batch(whole_loss(loss, sequence->ranks()), batch.data.size(1))) continue;
    accumulated = 0;
    if (!checkpoints.after_step()) continue;
    restarts = checkpoints.restart_wanted();
    log.begin_step();
  }
  log.finish();
  return !restarts;
}

// Returns the exit code.
int train(GptOptions options) {
  if (!options.pipeline_stages) options.pipeline_stages = stages_of_config(options);
  const std::unique_ptr<MetricsFile> metrics = open_outputs(options);
  TextCorpus corpus = TextCorpus::open_or_default(options.data);
  const bool pipelined = options.pipeline_stages.has_value();
  const std::shared_ptr<Gpt> model = pipelined ? nullptr : make_model(options);
  std::shared_ptr<ds::pipeline::PipelineModule> layers;
  const auto drops = std::make_shared<Drops>();
  if (pipelined) {
    layers = make_layers(options.model, options.seed, {options.pipeline_stages, options.pipeline_schedule}, drops);
  }

  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = pipelined ? std::shared_ptr<torch::nn::Module>(layers) : model,
                              .config = options.deepspeed_config,
                              .cuts_sequences = !pipelined,
                              .weights = pipelined ? options.init.value_or("") : "",
                              .device = options.device,
                              .auto_values = options.auto_values});
  require_used(*engine, options.auto_values);
  *drops = {ds::engine::progressive_layer_drop(engine), ds::engine::random_ltd(engine),
            ds::engine::sparse_self_attention(engine, options.model.heads)};
  if (model) model->leave_out(*drops);
  TokenBatches batches(corpus, batch_options(options, engine, corpus));
  print_start(options.model, corpus, *engine);

  RunCheckpoints checkpoints(*engine, options, corpus.size());
  checkpoints.load();
  const bool finished = pipelined ? train_pipeline(*engine, options, batches, checkpoints, metrics.get())
                                  : train_steps(engine, *model, options, batches, checkpoints, metrics.get());
  if (!finished) return ds::kRestartExitCode;
  engine->synchronize_parameters();  // a delayed update may be under way
  checkpoints.finish();

  save_weights(*engine, options);
  if (options.generate == 0) return EXIT_SUCCESS;
  print_sample(
      *engine,
      pipelined ? pipeline_logits(*engine)
                : [&model = *model](const at::Tensor& tokens) { return model.logits(tokens); },
      options);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  try {
    const auto options = gpt::parse_options(argc, argv);
    return options ? gpt::train(*options) : EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "gpt: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
