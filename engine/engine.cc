#include "dsengine/engine.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/tensor_check.h"
#include "engine/engine_impl.h"

namespace ds::engine {

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  if (!impl_->plan.locate_non_finite) return;
  impl_->gradient_check = std::make_unique<zero::GradientCheck>(impl_->device, /*lazy=*/!impl_->device.is_cpu());
  impl_->reducer->check_with(*impl_->gradient_check);
}

Engine::~Engine() {
  impl_->end_save();
  if (!impl_->offloaded) return;
  impl_->offloaded->abandon_update();  // it uses the optimizer
  impl_->roll_back_speculation();      // likewise
  impl_->report_speculation();
}

at::Tensor Engine::prepared(const at::Tensor& input) const {
  if (!input.defined()) return input;
  const bool casts = impl_->plan.cast_inputs && input.is_floating_point();
  return input.to(impl_->device, casts ? at::kHalf : input.scalar_type());
}

at::Tensor Engine::Impl::averaged(const at::Tensor& loss) const {
  return config.gradient_accumulation_steps == 1 ? loss
                                                 : loss / static_cast<double>(config.gradient_accumulation_steps);
}

at::Tensor Engine::Impl::scaled(const at::Tensor& averaged) const {
  const double scale = loss_scaler ? loss_scaler->scale() : 1.0;
  return scale == 1.0 ? averaged : averaged.to(at::kFloat) * scale;
}

void Engine::Impl::accumulate(bool boundary, const std::function<void()>& pass, std::vector<char> in_pass) {
  access->begin_backward(/*update_follows=*/boundary);
  if (reduction) reduction->begin_pass(global_steps, loss_scaler ? loss_scaler->scale() : 1.0);
  reducer->begin_backward(synchronize, boundary, std::move(in_pass));
  try {
    begin_speculation(boundary);
    pass();
    reducer->end_backward();
    end_arrivals();
    access->end_backward();
  } catch (...) {
    reducer->abandon_backward();
    roll_back_speculation();
    access->change_mode();
    throw;
  }
}

void Engine::Impl::begin_micro_batch(int64_t micro_batch) {
  if (gradient_check) gradient_check->begin_pass(micro_batch);
}

void Engine::name_batch(std::string name) { impl_->batches.name_next(std::move(name)); }

void Engine::Impl::note_phase(const char* phase) {
  world->note_phase(phase, global_steps + 1, micro_steps_since_update);
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  Impl& self = *impl_;
  require(!self.pipeline, "backward(): the model is a pipeline, whose forward and backward belong together; expected ",
          "engine->train_batch()");
  require(loss.defined() && loss.numel() == 1, "backward: expected a scalar loss, found ", describe(loss),
          "; reduce it first, for example with loss.mean()");
  require(loss.requires_grad(),
          "backward: the loss has no graph: expected a tensor computed from trainable parameters, found ",
          describe(loss), " that does not require a gradient (computed under NoGradGuard, or all parameters frozen?)");
  self.require_states_here("backward()");
  self.require_whole_state("backward()");
  self.roll_back_speculation();  // gradients add up: those it has used are not the last ones
  const Impl::Phase phase(self, "backward");
  self.reporter->backward_begins();
  const Autocast::Pause pause(self.device.type());
  const bool boundary = self.boundary_is_known() && self.at_boundary();
  const at::Tensor averaged = scale_wrt_gas ? self.averaged(loss) : loss;
  const at::Tensor scaled = self.scaled(averaged);
  self.batches.begin(self.micro_steps_since_update, self.loader.get());
  self.batches.keep_loss(self.micro_steps_since_update, loss.detach());
  self.begin_micro_batch(self.micro_steps_since_update);
  self.accumulate(boundary, [&] { scaled.backward({}, retain_graph); });
  ++self.backwards_since_step;
  self.reporter->backward_ends();
  return averaged.detach();
}

void Engine::step() {
  Impl& self = *impl_;
  require(!self.pipeline, "step(): the model is a pipeline; expected engine->train_batch(), which is a whole step");
  require(self.backwards_since_step > 0, "step() was called before backward(). Expected: loss = model->forward(...); ",
          "engine->backward(loss); engine->step()");
  require(self.synchronize, "step() was called inside no_sync(); end the no_sync scope first");
  require(self.gathered_scopes == 0, "step() was called while ", self.gathered_scopes,
          " scopes of gathered_parameters() are open; end them first");
  const bool boundary = self.at_boundary();
  ++self.micro_steps;
  ++self.micro_steps_since_update;
  self.backwards_since_step = 0;
  self.step_applied = false;
  if (!boundary) {
    self.access->end_pass();
    return;
  }
  self.complete_step(*this);
}

void Engine::Impl::complete_step(const Engine& engine, const at::Tensor& loss) {
  const Phase phase(*this, "step");
  reporter->step_begins();
  const Autocast::Pause pause(device.type());
  const int64_t micro_batches = std::exchange(micro_steps_since_update, 0);
  const int64_t optimizer_steps = optimizer ? optimizer->step_count() : 0;
  ++global_steps;
  global_samples += config.train_batch_size;
  try {
    update();
  } catch (const optimizers::LossScaleError&) {  // this step is over, and has been skipped
    access->end_pass();
    throw;
  } catch (const CommError&) {  // so is the job: nothing is left to wait for
    throw;
  } catch (...) {
    undo_accumulation(micro_batches, optimizer_steps);
    throw;
  }
  access->end_pass();
  if (step_applied) {
    ++applied_steps;
    if (schedule) schedule->step();
  }
  reporter->step_ends(engine, loss);
}

void Engine::Impl::undo_accumulation(int64_t micro_batches, int64_t optimizer_steps) noexcept {
  micro_steps -= micro_batches;
  --global_steps;
  global_samples -= config.train_batch_size;
  try {
    roll_back_speculation();
    if (optimizer && optimizer->step_count() > optimizer_steps) optimizer->set_step_count(optimizer_steps);
    drop_gradients();
    access->end_pass();
  } catch (const std::exception& error) {  // what is thrown is the first failure
    log::error("after a step() that failed: ", error.what());
  }
}

bool Engine::Impl::at_boundary() const {
  if (boundary_override) return *boundary_override;
  if (!config.managed_gradient_accumulation) return true;
  return micro_steps_since_update + 1 >= config.gradient_accumulation_steps;
}

// False: only step() tells, so that a backward() cannot yet reduce for the boundary.
bool Engine::Impl::boundary_is_known() const { return boundary_override || config.managed_gradient_accumulation; }

bool Engine::is_gradient_accumulation_boundary() const { return impl_->at_boundary(); }

void Engine::set_gradient_accumulation_boundary(std::optional<bool> is_boundary) {
  impl_->boundary_override = is_boundary;
}

Engine::NoSync Engine::no_sync() { return NoSync(*this); }

Engine::NoSync::NoSync(Engine& engine) : engine_(engine) {
  require(engine_.impl_->synchronize, "no_sync() inside no_sync(): expected one scope at a time");
  engine_.impl_->synchronize = false;
}

Engine::NoSync::~NoSync() { engine_.impl_->synchronize = true; }

void Engine::train() {
  impl_->access->change_mode();
  impl_->module->train();
}

void Engine::eval() {
  impl_->access->change_mode();
  impl_->module->eval();
}

void Engine::zero_grad() {
  Impl& self = *impl_;
  self.require_states_here("zero_grad()");
  // A program that does so in each micro-batch, as with torch's optimizers, would never come to a step.
  if (self.micro_steps_since_update > 0 && !self.reducer->failed() && self.world->rank() == 0 &&
      !std::exchange(self.warned_of_zero_grad, true)) {
    log::warning(
        "zero_grad() drops ", self.micro_steps_since_update, " of ", self.config.gradient_accumulation_steps,
        " micro-batches: the accumulation starts anew. step() clears the gradients itself; remove the call if ",
        "this is not what you want (said once)");
  }
  self.drop_gradients(/*unused=*/true);
  self.backwards_since_step = 0;
  self.micro_steps -= std::exchange(self.micro_steps_since_update, 0);
}

std::vector<double> Engine::get_lr() const {
  return impl_->client_optimizer ? learning_rates(*impl_->client_optimizer) : learning_rates(*impl_->optimizer);
}

std::vector<std::vector<double>> Engine::get_mom() const {
  std::vector<std::vector<double>> result;
  if (!impl_->optimizer) return result;
  const bool has_betas = impl_->optimizer->uses_betas();
  for (const optimizers::GroupOptions& group : impl_->optimizer->groups()) {
    result.push_back(has_betas ? std::vector<double>{group.beta1, group.beta2}
                               : std::vector<double>{group.momentum, 0.0});
  }
  return result;
}

std::string Engine::get_type() const { return impl_->optimizer ? impl_->optimizer->name() : "client optimizer"; }

std::optional<double> Engine::get_global_grad_norm() const { return impl_->gradient_norm; }

double Engine::loss_scale() const { return impl_->loss_scaler ? impl_->loss_scaler->scale() : 1.0; }

bool Engine::dynamic_loss_scale() const { return impl_->loss_scaler && impl_->loss_scaler->dynamic(); }

bool Engine::was_step_applied() const { return impl_->step_applied; }

Engine::Speculation Engine::speculation() const {
  const SpeculationGate& gate = impl_->speculation_gate;
  return {.stood = gate.stood(), .rolled_back = gate.rolled_back(), .without = gate.steps_without()};
}

int64_t Engine::global_steps() const { return impl_->global_steps; }

int64_t Engine::global_samples() const { return impl_->global_samples; }

int64_t Engine::micro_steps() const { return impl_->micro_steps; }

int64_t Engine::skipped_steps() const { return impl_->global_steps - impl_->applied_steps; }

int64_t Engine::train_batch_size() const { return impl_->config.train_batch_size; }

int64_t Engine::train_micro_batch_size_per_gpu() const { return impl_->config.train_micro_batch_size_per_gpu; }

int64_t Engine::gradient_accumulation_steps() const { return impl_->config.gradient_accumulation_steps; }

void Engine::set_train_batch_size(int64_t size) {
  const int64_t unit = train_micro_batch_size_per_gpu() * dp_world_size();
  require(size > 0 && size % unit == 0, "set_train_batch_size: expected a positive multiple of ", unit, " (",
          train_micro_batch_size_per_gpu(), " per rank x ", dp_world_size(), " ranks), found ", size);
  require(impl_->micro_steps_since_update == 0 && impl_->backwards_since_step == 0,
          "set_train_batch_size: called inside an accumulation, after ", impl_->micro_steps_since_update, " of ",
          gradient_accumulation_steps(), " micro-batches; call it between optimizer steps");
  impl_->config.gradient_accumulation_steps = size / unit;
  impl_->config.train_batch_size = size;
}

void Engine::set_train_micro_batch_size(int64_t size) {
  require(size > 0, "set_train_micro_batch_size: expected a positive size, found ", size);
  if (impl_->loader) impl_->loader->set_micro_batch_size(size);
  if (impl_->pipeline) impl_->pipeline->runner->messages().reset_shapes();
  impl_->config.train_micro_batch_size_per_gpu = size;
  impl_->config.train_batch_size = size * gradient_accumulation_steps() * dp_world_size();
}

int Engine::global_rank() const { return impl_->world->rank(); }

int Engine::local_rank() const { return impl_->local_rank; }

int Engine::world_size() const { return impl_->world->size(); }

int Engine::dp_world_size() const { return impl_->communicator->size(); }

int Engine::mp_world_size() const { return 1; }

at::Device Engine::device() const { return impl_->device; }

int Engine::zero_optimization_stage() const { return static_cast<int>(impl_->config.zero_optimization.stage); }

const config::DsConfig& Engine::config() const { return impl_->config; }

const Plan& Engine::plan() const { return impl_->plan; }

const std::shared_ptr<torch::nn::Module>& Engine::module() const { return impl_->module; }

comm::Communicator& Engine::communicator() const { return *impl_->communicator; }

comm::Communicator& Engine::world() const { return *impl_->world; }

std::vector<comm::Communicator*> Engine::Impl::all_groups() const {
  std::vector<comm::Communicator*> all = {world.get()};
  std::vector<std::shared_ptr<comm::Communicator>> others = {communicator, groups.shards, groups.replicas,
                                                             groups.parameters, groups.node};
  if (pipeline) {
    others.push_back(pipeline->ranks);
    for (const TiedWeights& tied : pipeline->tied) others.push_back(tied.ranks);
    for (auto& group : pipeline->runner->messages().groups()) others.push_back(std::move(group));
  }
  if (groups.quantized) others.insert(others.end(), {groups.quantized->inside(), groups.quantized->across()});
  for (auto& group : groups.compression.all()) others.push_back(std::move(group));
  for (const auto& group : others) {
    if (group && std::find(all.begin(), all.end(), group.get()) == all.end()) all.push_back(group.get());
  }
  return all;
}

int64_t Engine::comm_bytes_sent() const {
  int64_t bytes = 0;
  for (const comm::Communicator* group : impl_->all_groups()) bytes += group->counters().total_bytes_sent();
  return bytes;
}

void Engine::reset_comm_counters() {
  for (comm::Communicator* group : impl_->all_groups()) group->reset_counters();
}

const std::shared_ptr<optimizers::ShardOptimizer>& Engine::optimizer() const { return impl_->optimizer; }

const std::shared_ptr<LrScheduler>& Engine::lr_scheduler() const { return impl_->schedule; }

const std::shared_ptr<DataLoader>& Engine::training_dataloader() const { return impl_->loader; }

void Engine::synchronize_parameters() {
  impl_->require_states_here("synchronize_parameters()");
  impl_->finish_delayed_update();
  impl_->roll_back_speculation();
  impl_->access->wait_all();
}

}  // namespace ds::engine
