#include "dsengine/engine.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/split/split_tensor.h"
#include "core/tensor_check.h"
#include "dsengine/sequence_attention.h"
#include "engine/engine_impl.h"

namespace ds::engine {

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() {
  if (!impl_->process.is_this()) {  // Note [Forked children]
    [[maybe_unused]] const Impl* const stays = impl_.release();
    return;
  }
  impl_->saves.end();
  if (impl_->step) impl_->step->late().log_unjudged();
  if (impl_->comms) impl_->comms->end();
  impl_->update.reset();                        // it uses the optimizer
  if (impl_->shown) impl_->shown->take_back();  // it ends between backward() and step()
}

at::Tensor Engine::prepared(const at::Tensor& input) const {
  if (!input.defined()) return input;
  const bool casts = impl_->state.plan.cast_inputs && input.is_floating_point();
  const at::Tensor arrived = impl_->inputs->upload(impl_->parity ? impl_->parity->given(input) : input);
  at::Tensor given = casts ? arrived.to(at::kHalf) : arrived;
  const TensorParts* const axis = impl_->state.tensor.get();
  const int64_t dimension = impl_->config.sequence_parallel.dimension;
  if (axis == nullptr || !axis->cuts_batches || given.dim() <= dimension || is_split(given)) return given;
  impl_->shared_batches.note(given);
  return parallel::cut_sequence(given, axis->split.axis, dimension);
}

void Engine::train() {
  impl_->state.access->change_mode();
  impl_->state.module->train();
}

void Engine::eval() {
  impl_->state.access->change_mode();
  impl_->state.module->eval();
}

// A step that was skipped takes its changes back, which is known once the device has told of it (LateStep::read).
std::vector<double> Engine::get_lr() const {
  impl_->step->late().read();
  return impl_->state.optimizer.learning_rates();
}

std::vector<std::vector<double>> Engine::get_mom() const {
  impl_->step->late().read();
  return impl_->state.optimizer.momenta();
}

std::string Engine::get_type() const { return impl_->state.optimizer.name(); }

std::optional<double> Engine::get_global_grad_norm() const {
  impl_->step->late().read();
  return impl_->progress.gradient_norm;
}

double Engine::loss_scale() const { return impl_->scaled_backward->loss_scale(); }

bool Engine::dynamic_loss_scale() const { return impl_->loss_scaler && impl_->loss_scaler->dynamic(); }

bool Engine::was_step_applied() const {
  impl_->step->late().read();
  return impl_->progress.step_applied;
}

Engine::Speculation Engine::speculation() const {
  const SpeculationGate& gate = impl_->progress.speculation;
  return {.stood = gate.stood(), .rolled_back = gate.rolled_back(), .without = gate.steps_without()};
}

int64_t Engine::global_steps() const { return impl_->progress.global_steps; }

int64_t Engine::global_samples() const { return impl_->progress.global_samples; }

int64_t Engine::micro_steps() const { return impl_->progress.micro_steps; }

int64_t Engine::skipped_steps() const {
  impl_->step->late().read();
  return impl_->progress.skipped_steps();
}

int64_t Engine::train_batch_size() const { return impl_->config.train_batch_size; }

int64_t Engine::train_micro_batch_size_per_gpu() const { return impl_->config.train_micro_batch_size_per_gpu; }

int64_t Engine::gradient_accumulation_steps() const { return impl_->config.gradient_accumulation_steps; }

void Engine::set_train_batch_size(int64_t size) {
  const int64_t unit = train_micro_batch_size_per_gpu() * dp_world_size();
  require(size > 0 && size % unit == 0, "set_train_batch_size: expected a positive multiple of ", unit, " (",
          train_micro_batch_size_per_gpu(), " per rank x ", dp_world_size(), " ranks), found ", size);
  impl_->order.require(Call::kSetTrainBatchSize);
  if (impl_->sampler) impl_->sampler->set_accumulation(size / unit);
  impl_->config.gradient_accumulation_steps = size / unit;
  impl_->order.micro_batches.set_per_update(size / unit);
  impl_->config.train_batch_size = size;
}

void Engine::set_train_micro_batch_size(int64_t size) {
  require(size > 0, "set_train_micro_batch_size: expected a positive size, found ", size);
  if (impl_->sampler) impl_->sampler->set_batch_size(size);
  if (impl_->state.pipeline) impl_->state.pipeline->runner->messages().reset_shapes();
  impl_->config.train_micro_batch_size_per_gpu = size;
  impl_->config.train_batch_size = size * gradient_accumulation_steps() * dp_world_size();
}

int Engine::global_rank() const { return impl_->state.ranks.world->rank(); }

int Engine::local_rank() const { return impl_->state.ranks.local_rank; }

int Engine::world_size() const { return impl_->state.ranks.world->size(); }

int Engine::dp_world_size() const { return impl_->state.ranks.data->size(); }

int Engine::mp_world_size() const { return impl_->state.ranks.tensor_ranks(); }

std::vector<parallel::JoinedOperator> Engine::joined_operators() const {
  const auto& tensor = impl_->state.tensor;
  return tensor ? tensor->split.joined_operators() : std::vector<parallel::JoinedOperator>();
}

at::Device Engine::device() const { return impl_->state.ranks.device; }

int Engine::zero_optimization_stage() const { return static_cast<int>(impl_->config.zero_optimization.stage); }

const config::DsConfig& Engine::config() const { return impl_->config; }

const Plan& Engine::plan() const { return impl_->state.plan; }

const std::shared_ptr<torch::nn::Module>& Engine::module() const { return impl_->state.module; }

comm::Communicator& Engine::communicator() const { return *impl_->state.ranks.data; }

comm::Communicator& Engine::world() const { return *impl_->state.ranks.world; }

at::Tensor Engine::mean(const at::Tensor& tensor) const {
  impl_->order.require(Call::kMean);
  require(tensor.defined() && !tensor.is_complex() && tensor.layout() == at::kStrided,
          "mean(): expected a dense tensor of real numbers, found ", describe(tensor));
  const at::NoGradGuard no_grad;
  const Ranks& ranks = impl_->state.ranks;
  const bool is_narrow = tensor.is_floating_point() && tensor.element_size() < 4;
  const at::ScalarType wide = is_narrow ? at::kFloat : tensor.is_floating_point() ? tensor.scalar_type() : at::kDouble;
  const at::Tensor result =
      tensor.detach().to(ranks.device, wide, /*non_blocking=*/false, /*copy=*/true).contiguous().view({-1});
  if (ranks.part->size() > 1 && result.numel() > 0) {
    ranks.part->all_reduce(result, comm::ReduceOp::kAvg, "mean() of the program").wait();
  }
  return result.to(tensor.device()).view(tensor.sizes());
}

bool Engine::agree(bool flag) const {
  impl_->order.require(Call::kAgree);
  const Ranks& ranks = impl_->state.ranks;
  return largest_of_ranks(flag ? 1 : 0, ranks.device, *ranks.world, "agree() of the program") == 1;
}

int64_t Engine::comm_bytes_sent() const {
  int64_t bytes = 0;
  for (const comm::Communicator* group : impl_->state.all_groups()) bytes += group->counters().total_bytes_sent();
  return bytes;
}

void Engine::reset_comm_counters() {
  for (comm::Communicator* group : impl_->state.all_groups()) group->reset_counters();
}

std::shared_ptr<optimizers::ShardOptimizer> Engine::optimizer() const { return impl_->state.optimizer.of_config(); }

const std::shared_ptr<LrScheduler>& Engine::lr_scheduler() const { return impl_->schedule; }

const std::shared_ptr<DataLoader>& Engine::training_dataloader() const { return impl_->loader; }

}  // namespace ds::engine
