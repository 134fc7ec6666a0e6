// A schedule as the driver of steps: train_batch(), and what belongs to pipelines.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/device/readback.h"
#include "core/files/atomic_file.h"
#include "core/json/parse_json.h"
#include "core/without_stack.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "engine/update/micro_batch_digests.h"
#include "engine/update/summable_digest.h"

namespace ds::engine {
namespace {

PipelineState& pipeline_of(Engine::Impl& impl, Call call) {
  impl.order.require_driver(call);
  return *impl.state.pipeline;
}

// Batches of a loader, epoch after epoch. `impl` outlives the result.
pipeline::BatchSource source_of(Engine::Impl& impl, std::shared_ptr<DataLoader> loader) {
  return [&impl, loader = std::move(loader)]() -> pipeline::MicroBatch {
    auto next = loader->begin();
    if (next == loader->end()) next = loader->begin();
    require(next != loader->end(), "train_batch: the training data has no batches");
    pipeline::MicroBatch batch;
    batch.inputs.push_back(std::move(next->data));  // what the loader kept would be copied
    if (next->target.defined()) batch.labels.push_back(std::move(next->target));
    impl.batches.name_next(name_of_samples(loader->indices()));
    return batch;
  };
}

// Returns the mean loss of the micro-batches, which ranks of the last stage have, as a scalar on all ranks: float64 for
// a float64 model, else float32. `beside`: float64 [n], which is added up over all ranks with it; undefined: nothing.
at::Tensor mean_of_all(const ModelState& state, const std::vector<at::Tensor>& losses, const at::Tensor& beside = {}) {
  const Ranks& ranks = state.ranks;
  const at::ScalarType dtype = state.plan.model_dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
  const int64_t others = beside.defined() ? beside.numel() : 0;
  const at::Tensor sums = at::zeros({1 + others}, at::TensorOptions().dtype(at::kDouble).device(ranks.device));
  const at::Tensor mean = sums.narrow(0, 0, 1);
  if (!losses.empty()) {
    std::vector<at::Tensor> scalars;
    for (const at::Tensor& loss : losses) scalars.push_back(loss.to(dtype).reshape({}));
    // Ranks of a tensor axis have the same losses.
    mean.copy_(at::stack(scalars).mean() / (static_cast<double>(ranks.part->size()) * ranks.tensor_ranks()));
  }
  if (others > 0) sums.narrow(0, 1, others).copy_(beside);
  if (ranks.world->size() > 1) ranks.world->all_reduce(sums, comm::ReduceOp::kSum, "loss").wait();
  if (others > 0) beside.copy_(sums.narrow(0, 1, others));
  return mean.to(dtype).reshape({});
}

// Evaluation mode while it lives; then every module has the mode it had. `model` outlives it.
class EvaluationMode {
 public:
  explicit EvaluationMode(ModelState& model) : model_(model) {
    for (const auto& module : model.module->modules()) modes_.emplace_back(module, module->is_training());
    model.access->change_mode();
    model.module->eval();
  }
  ~EvaluationMode() {
    model_.access->change_mode();
    for (auto& [module, trains] : modes_) module->train(trains);  // submodules, which it also sets, come after it
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  ModelState& model_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
};

// After a batch that threw `failure`: gradients of the micro-batches that were finished belong to no update. With
// several stages there is none any more, and reductions that are under way may wait for ranks that wait for this one.
void drop_batch(Engine::Impl& impl, const std::exception_ptr& failure) {
  impl.state.access->change_mode();
  if (impl.state.pipeline_ranks() > 1) return;
  ++impl.accumulations;
  try {
    impl.scaled_backward->drop(/*unused=*/true);
  } catch (const std::exception& error) {
    throw CommError(cat(comm::message_of(failure),
                        "; the gradients of the batch could not be dropped: ", without_stack(error.what())));
  }
}

// Digests of the micro-batches that this rank takes; null where no other rank takes the same ones.
std::shared_ptr<MicroBatchDigests> digests_of(const Engine::Impl& engine, int micro_batches) {
  const TensorParts* const tensor = engine.state.tensor.get();
  if (engine.state.pipeline_ranks() == 1 && tensor == nullptr) return nullptr;
  using Stage = MicroBatchDigests::Stage;
  // A rank with both stages takes all of a micro-batch by itself.
  const bool first = has_first_stage(engine.state.pipeline.get());
  const bool last = has_last_stage(engine.state.pipeline.get());
  const Stage stage = first == last ? Stage::kOther : first ? Stage::kFirst : Stage::kLast;
  const auto axis = tensor ? MicroBatchDigests::AxisPlace{.rank = tensor->ranks->rank(), .ranks = tensor->ranks->size()}
                           : MicroBatchDigests::AxisPlace{};
  return std::make_shared<MicroBatchDigests>(micro_batches, stage, axis);
}

void require_defined(const pipeline::Tensors& tensors, const char* kind) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    require(tensors[i].defined(), kind, i,
            " is undefined: expected a tensor; leave it out, or give torch::empty({0}) in its place");
  }
}

// Returns the next micro-batch of a source, and shows it to `taken`.
pipeline::MicroBatch given_by(const pipeline::BatchSource& next, MicroBatchDigests* taken) {
  pipeline::MicroBatch batch = next();
  require_defined(batch.inputs, "input ");
  require_defined(batch.labels, "label ");
  if (taken) taken->see(batch);
  return batch;
}

// Returns what stages compare, the settings of the step and the micro-batches, on the device; undefined where there is
// one rank.
at::Tensor facts_of_stages(Engine::Impl& engine, const std::shared_ptr<MicroBatchDigests>& taken) {
  if (!taken) return {};
  engine.step->late().read(/*judged_next=*/true);  // some ranks may have, and loss scale and schedule follow from it
  const at::Device device = engine.state.ranks.device;
  const uint64_t settings = engine.settings->digest(StepSettings::Among::kStages);
  return at::cat({sent_to(device, summable_digest(settings)), taken->summable(device)});
}

// Returns the calls by which a runner trains, but for the source. `self` outlives the result.
pipeline::StageCallbacks backward_callbacks(Engine::Impl& self) {
  return {.next = {},
          .root =
              [&self](const at::Tensor& loss) {
                const Autocast::Pause pause(self.state.ranks.device.type());
                return self.scaled_backward->scaled(self.scaled_backward->averaged(loss));
              },
          .accumulate =
              [&self](const pipeline::Action& action, bool last, const std::function<void()>& pass) {
                const Autocast::Pause pause(self.state.ranks.device.type());
                self.scaled_backward->begin_micro_batch(action.micro_batch);
                const auto stage = static_cast<size_t>(action.stage);
                self.scaled_backward->run(last, pass, self.state.pipeline->bucket_in_pass.at(stage));
              },
          .inputs_only =
              [&self](const std::function<void()>& pass) {
                const Autocast::Pause pause(self.state.ranks.device.type());
                pass();
              }};
}

}  // namespace

at::Tensor Engine::train_batch() {
  const PipelineState& parts = pipeline_of(*impl_, Call::kTrainBatch);
  if (parts.source) return train_batch(parts.source);
  require(impl_->loader != nullptr, "train_batch(): expected training data, found none; pass .training_data to ",
          "initialize, call set_dataloader() or set_dataiterator(), or call train_batch(source)");
  return train_batch(source_of(*impl_, impl_->loader));
}

pipeline::MicroBatch Engine::on_device(pipeline::MicroBatch batch) const {
  for (at::Tensor& input : batch.inputs) input = prepared(input);
  for (at::Tensor& label : batch.labels) label = impl_->inputs->upload(label);
  return batch;
}

at::Tensor Engine::train_batch(const pipeline::BatchSource& next) {
  Impl& self = *impl_;
  PipelineState& parts = pipeline_of(self, Call::kTrainBatch);
  self.order.require(Call::kTrainBatch);
  self.reporter->trace_step(self.progress.global_steps);
  const auto micro_batches = static_cast<int>(self.config.gradient_accumulation_steps);
  const pipeline::Schedule& schedule = training_schedule(parts, self.state.plan, micro_batches);
  self.progress.step_applied = false;
  if (!self.state.module->is_training()) train();
  if (self.state.tensor) {
    self.state.tensor->require_leaves("train_batch()");
    self.state.tensor->next_batch();  // of stages that are given none
  }
  int64_t given = 0;
  const std::shared_ptr<MicroBatchDigests> taken = digests_of(self, micro_batches);
  pipeline::StageCallbacks callbacks = backward_callbacks(self);
  const auto source = [&] { return self.parity ? self.parity->given(next) : next(); };
  callbacks.next = [&] {
    pipeline::MicroBatch batch = on_device(given_by(source, taken.get()));
    if (self.state.tensor) self.state.tensor->next_batch();
    self.batches.begin(given++, self.loader.get());
    return batch;
  };
  const Phases::Scope phase(self.phases, "train_batch");
  self.reporter->backward_begins();
  pipeline::StageRunner::Result result;
  try {
    result = parts.runner->run(schedule, callbacks);
  } catch (...) {
    drop_batch(self, std::current_exception());
    throw;
  }
  self.reporter->backward_ends();
  for (size_t i = 0; i < result.losses.size(); ++i) {
    self.batches.keep_loss(static_cast<int64_t>(i), result.losses[i], 1.0 / static_cast<double>(result.losses.size()));
  }
  try {
    self.require_step("train_batch()");
  } catch (...) {  // before the batch is counted
    self.scaled_backward->drop(/*unused=*/true);
    throw;
  }
  const at::Tensor facts = facts_of_stages(self, taken);
  const at::Tensor loss = mean_of_all(self.state, result.losses, facts);
  self.step->note_stages(facts, taken);
  self.progress.micro_steps += micro_batches;
  self.order.micro_batches.note_batch(micro_batches);
  if (self.parity) {
    for (const at::Tensor& one : result.losses) self.parity->note_loss(one);
    self.parity->before_update(*this);
  }
  self.complete_step(loss);
  if (self.parity) self.parity->after_update(*this, loss);
  return loss;
}

Evaluation Engine::eval_batch(const pipeline::BatchSource& next, const EvalOptions& options) {
  Impl& self = *impl_;
  PipelineState& parts = pipeline_of(self, Call::kEvalBatch);
  self.order.require(Call::kEvalBatch);
  const auto micro_batches =
      static_cast<int>(options.num_micro_batches.value_or(self.config.gradient_accumulation_steps));
  require(micro_batches > 0, "eval_batch: num_micro_batches: expected a positive number, found ", micro_batches);
  const pipeline::Schedule& schedule = evaluation_schedule(parts, micro_batches);
  const Phases::Scope phase(self.phases, "eval_batch");
  const std::shared_ptr<MicroBatchDigests> taken = options.compute_loss ? digests_of(self, micro_batches) : nullptr;
  const pipeline::StageCallbacks callbacks = {
      .next = [&] { return on_device(given_by(next, taken.get())); }, .root = {}, .accumulate = {}, .inputs_only = {}};
  pipeline::StageRunner::Result result;
  {
    const EvaluationMode mode(self.state);
    result = parts.runner->run(schedule, callbacks, options.compute_loss, options.return_logits);
  }
  Evaluation evaluation;
  if (options.compute_loss) {
    const at::Device device = self.state.ranks.device;
    const at::Tensor facts = taken ? taken->summable(device) : at::Tensor();
    evaluation.loss = mean_of_all(self.state, result.losses, facts);
    if (taken) {
      taken->require_same(facts.cpu(), self.state.ranks.part->rank(), *self.state.ranks.world, device,
                          "The evaluation means nothing");
    }
  }
  evaluation.logits = std::move(result.outputs);
  if (options.return_logits && options.broadcast_logits && parts.ranks->size() > 1) {
    evaluation.logits.resize(static_cast<size_t>(micro_batches));
    for (std::vector<at::Tensor>& outputs : evaluation.logits) {
      outputs = parts.runner->messages().broadcast(outputs, parts.module->placement().back());
    }
  }
  return evaluation;
}

void Engine::set_dataloader(std::shared_ptr<DataLoader> loader) {
  require(loader != nullptr, "set_dataloader: expected a loader, found none");
  PipelineState& parts = pipeline_of(*impl_, Call::kSetDataloader);
  require_equal_batches(parts, *loader, "set_dataloader()");
  parts.source = source_of(*impl_, std::move(loader));
}

void Engine::set_dataiterator(pipeline::BatchSource next) {
  require(static_cast<bool>(next), "set_dataiterator: expected a function, found none");
  pipeline_of(*impl_, Call::kSetDataiterator).source = std::move(next);
}

bool Engine::is_first_stage() const { return has_first_stage(impl_->state.pipeline.get()); }

bool Engine::is_last_stage() const { return has_last_stage(impl_->state.pipeline.get()); }

int Engine::pipe_parallel_size() const { return impl_->state.pipeline_ranks(); }

int Engine::pipe_parallel_rank() const { return impl_->state.pipeline_rank(); }

void Engine::reset_activation_shape() {
  pipeline_of(*impl_, Call::kResetActivationShape).runner->messages().reset_shapes();
}

void Engine::trace_pipeline(bool on) { pipeline_of(*impl_, Call::kTracePipeline).runner->trace(on); }

// Clocks of hosts differ; the first rank's pipeline is what is drawn, so its ranks' events are gathered.
void Engine::write_pipeline_trace(const std::string& path) {
  Impl& self = *impl_;
  PipelineState& parts = pipeline_of(self, Call::kWritePipelineTrace);
  nlohmann::json events = nlohmann::json::array();
  for (const pipeline::TracedAction& traced : parts.runner->traced()) {
    events.push_back({{"name", pipeline::to_text(traced.action)},
                      {"ph", "X"},
                      {"pid", 0},
                      {"tid", parts.ranks->rank()},
                      {"ts", traced.start * 1e6},
                      {"dur", (traced.end - traced.start) * 1e6}});
  }
  const std::string own = events.dump();
  std::vector<std::string> texts = {own};
  for (int rank = 1; rank < parts.ranks->size(); ++rank) {
    const bool mine = parts.ranks->rank() == rank;
    if (!mine && parts.ranks->rank() != 0) continue;
    at::Tensor length = at::zeros({1}, at::kLong);
    if (mine) length.fill_(static_cast<int64_t>(own.size()));
    length = length.to(self.state.ranks.device);
    at::Tensor bytes;
    if (mine) {
      parts.ranks->send(length, 0);
      bytes = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
      std::memcpy(bytes.data_ptr(), own.data(), own.size());
      parts.ranks->send(bytes.to(self.state.ranks.device), 0);
    } else {
      parts.ranks->recv(length, rank);
      bytes = at::empty({length.item<int64_t>()}, at::TensorOptions().dtype(at::kByte).device(self.state.ranks.device));
      parts.ranks->recv(bytes, rank);
      bytes = bytes.cpu();
      texts.emplace_back(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
    }
  }
  std::exception_ptr failure;
  try {
    if (self.state.ranks.world->rank() == 0) {
      nlohmann::json all = nlohmann::json::array();
      for (const std::string& text : texts) {
        for (nlohmann::json& event : parse_json<nlohmann::json>(text)) all.push_back(std::move(event));
      }
      write_whole_file(path, nlohmann::json{{"traceEvents", std::move(all)}}.dump(), /*durable=*/false);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const int failed = failed_rank(failure, self.state.ranks.device, *self.state.ranks.world);
  require<IoError>(failed < 0, "write_pipeline_trace: rank 0 could not write ", path, ", its message says why");
}

}  // namespace ds::engine
