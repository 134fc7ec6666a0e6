#include "pipeline/stage_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "core/memory/tensor_holders.h"
#include "core/tensor_check.h"
#include "core/trace_span.h"
#include "pipeline/placed_errors.h"
#include "pipeline/split_activations.h"

namespace ds::pipeline {
namespace {

// What is behind a message about a micro-batch of which the source gave a part only.
std::string without(const char* what) {
  return cat("; the source gave no ", what, " for this micro-batch. One that is at its end begins again, or throws");
}

// Makes copies of those tensors whose memory others can write: Note [Memory that others can write]. `given`: what the
// stage was given for the micro-batch. `tensors` is the runner's only hold on them.
void keep_apart(Tensors& tensors, const Tensors& given) {
  const std::vector<bool> shared = find_shared(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!shared[i] && !has_given_memory(tensor)) continue;
    const bool passed_on = std::any_of(given.begin(), given.end(), [&](const at::Tensor& one) {
      return one.defined() && one.has_storage() && is_same_storage(one.storage(), tensor.storage());
    });
    if (passed_on) continue;
    const auto times = static_cast<size_t>(
        std::count_if(tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return one.is_same(tensor); }));
    if (tensor.grad_fn() && tensor.use_count() <= times) continue;
    tensors[i] = tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  }
}

// Makes the memory of a micro-batch the runner's own, so that its source may use its own again.
void take_over(MicroBatch& batch) {
  const auto inputs = static_cast<std::ptrdiff_t>(batch.inputs.size());
  Tensors all = std::move(batch.inputs);
  all.insert(all.end(), std::make_move_iterator(batch.labels.begin()), std::make_move_iterator(batch.labels.end()));
  batch.labels.clear();
  const std::vector<bool> shared = find_shared(all);
  for (size_t i = 0; i < all.size(); ++i) {
    if (shared[i] || has_given_memory(all[i])) all[i] = all[i].clone();
  }
  batch.inputs.assign(std::make_move_iterator(all.begin()), std::make_move_iterator(all.begin() + inputs));
  batch.labels.assign(std::make_move_iterator(all.begin() + inputs), std::make_move_iterator(all.end()));
}

}  // namespace

// State of one batch.
struct StageRunner::Run {
  const Schedule& schedule;
  const StageCallbacks& callbacks;
  bool with_loss = true;
  bool keep_outputs = false;
  std::map<Key, Passing> passing;
  std::map<int, MicroBatch> loaded;  // of the first and the last stage, until both have used it
  std::map<int, int> uses;           // of each loaded one, still to come
  int next_load = 0;
  int passes_left = 0;                            // that add to gradients of weights
  std::chrono::steady_clock::time_point arrived;  // when what the running action computes from was there
  Result result;
};

StageRunner::StageRunner(const PipelineModule& module, comm::Communicator& ranks, const MessageOptions& options)
    : module_(module), ranks_(ranks), device_(options.device), axis_(options.axis), messages_(ranks, options) {
  if (!device_.is_cpu()) messages_.open(module.placement());
}

StageRunner::Result StageRunner::run(const Schedule& schedule, const StageCallbacks& callbacks, bool with_loss,
                                     bool keep_outputs) {
  require(failure_.empty(), "this pipeline of ", ranks_.size(), " ranks cannot go on, for a batch has failed on this ",
          "one: messages of it may be under way, or missing, between the stages. Expected: the job ends on all ranks ",
          "and goes on from its last checkpoint. What the batch said: ", failure_);
  const at::AutoGradMode gradients(schedule.training);
  Run run{.schedule = schedule,
          .callbacks = callbacks,
          .with_loss = with_loss,
          .keep_outputs = keep_outputs,
          .passing = {},
          .loaded = {},
          .uses = {},
          .arrived = {},
          .result = {}};
  if (ranks_.size() == 1) return run_batch(run);
  try {
    return run_batch(run);
  } catch (const std::exception& error) {
    failure_ = error.what();
    throw;
  } catch (...) {
    failure_ = "an exception of unknown type";
    throw;
  }
}

StageRunner::Result StageRunner::run_batch(Run& run) {
  const Schedule& schedule = run.schedule;
  const std::vector<Action>& actions = schedule.actions.at(static_cast<size_t>(ranks_.rank()));
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput) ++run.passes_left;
  }
  const auto micro_batches = static_cast<size_t>(schedule.shape.micro_batches);
  if (here(run, schedule.stages() - 1)) {
    if (run.with_loss) run.result.losses.resize(micro_batches);
    if (run.keep_outputs) run.result.outputs.resize(micro_batches);
  }
  if (traces_) traced_.clear();
  for (const Action& action : actions) do_action(run, action);
  messages_.finish();
  if (!schedule.training) messages_.reset_evaluation_shapes();  // each evaluation has its own
  ensure(run.passing.empty(), "every micro-batch leaves its stage");
  return std::move(run.result);
}

bool StageRunner::here(const Run& run, int stage) const {
  return run.schedule.rank_of.at(static_cast<size_t>(stage)) == ranks_.rank();
}

// Returns the route of a message about the output of stage `made_by`, to or from the rank of stage `neighbour`.
StageMessages::Route StageRunner::route(const Run& run, const Action& action, int made_by, int neighbour) const {
  return {made_by, action.micro_batch, run.schedule.rank_of.at(static_cast<size_t>(neighbour))};
}

void StageRunner::do_action(Run& run, const Action& action) {
  const int stage = action.stage;
  run.arrived = std::chrono::steady_clock::now();
  const TraceSpan span([&] { return cat("pipeline: ", to_text(action)); });
  const auto passing = [&]() -> Passing& { return run.passing.at({stage, action.micro_batch}); };
  switch (action.kind) {
    case ActionKind::kForward:
      forward(run, action);
      break;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      backward(run, action);
      break;
    case ActionKind::kBackwardWeight:
      backward_weight(run, action);
      break;
    case ActionKind::kSendActivation:
      require_outputs_unchanged(stage, action.micro_batch, passing(), /*read=*/false);
      messages_.send_activation(route(run, action, stage, stage + 1), passing().outputs, passing().splits,
                                lazy([&] { return module_.describe(stage); }));
      if (run.schedule.training) {
        passing().outputs.clear();
      } else {
        run.passing.erase({stage, action.micro_batch});
      }
      return;
    case ActionKind::kRecvActivation:
      return messages_.begin_activation(route(run, action, stage - 1, stage - 1));
    case ActionKind::kSendGradient: {
      Passing& own = passing();
      messages_.send_gradient(route(run, action, stage - 1, stage - 1), own.inputs, own.gradients);
      own.gradients.clear();
      own.inputs = {};
      if (!own.backward) run.passing.erase({stage, action.micro_batch});
      return;
    }
    case ActionKind::kRecvGradient:
      return messages_.begin_gradient(route(run, action, stage, stage + 1));
    case ActionKind::kReduceTied:
    case ActionKind::kReduce:
    case ActionKind::kStep:
      return;  // the caller's
  }
  if (traces_) record(action, run.arrived);
}

const MicroBatch& StageRunner::micro_batch(Run& run, int index) {
  // Batches come in order; the schedule may want them in another.
  const int last = run.schedule.stages() - 1;
  for (; run.next_load <= index; ++run.next_load) {
    const auto place = [&] {
      return cat("micro-batch ", run.next_load, ", source of stage ", here(run, 0) ? 0 : last, ": ");
    };
    MicroBatch batch = with_place(place, run.callbacks.next);
    take_over(batch);
    run.loaded[run.next_load] = std::move(batch);
    run.uses[run.next_load] = (here(run, 0) ? 1 : 0) + (here(run, last) ? 1 : 0);
  }
  return run.loaded.at(index);
}

void StageRunner::use_up(Run& run, int micro_batch) {
  if (--run.uses.at(micro_batch) == 0) run.loaded.erase(micro_batch);
}

// Returns what a stage is given for a micro-batch, as leaves.
Activation StageRunner::inputs_of(Run& run, const Action& action) {
  const int stage = action.stage;
  Activation result;
  Tensors& inputs = result.tensors;
  if (stage == 0) {
    for (const at::Tensor& input : micro_batch(run, action.micro_batch).inputs) inputs.push_back(input.detach());
    result.splits.resize(inputs.size());
    use_up(run, action.micro_batch);
  } else if (here(run, stage - 1)) {
    const Key before = {stage - 1, action.micro_batch};
    const Passing& passing = run.passing.at(before);
    require_outputs_unchanged(stage - 1, action.micro_batch, passing, /*read=*/false);
    for (const at::Tensor& output : passing.outputs) {
      inputs.push_back(output.detach());
      if (output.requires_grad()) inputs.back().set_requires_grad(true);
    }
    result.splits = passing.splits;
    if (!run.schedule.training) run.passing.erase(before);
  } else {
    result = messages_.activation(route(run, action, stage - 1, stage - 1));
    run.arrived = std::chrono::steady_clock::now();
  }
  return result;
}

void StageRunner::forward(Run& run, const Action& action) {
  const int stage = action.stage;
  const int last = run.schedule.stages() - 1;
  Passing& own = run.passing[{stage, action.micro_batch}];
  own.inputs = inputs_of(run, action);
  const bool nothing_given = stage == 0 && own.inputs.tensors.empty();
  own.outputs = with_place(
      [&] { return cat("micro-batch ", action.micro_batch, ", "); },
      [&] { return nothing_given ? without("inputs") : ""; },
      [&] { return module_.forward_stage(stage, with_full_sizes(own.inputs.tensors, own.inputs.splits, axis_)); });
  if (stage == last) {
    finish_last(run, action, own);
  } else {
    const auto place =
        lazy([&] { return cat("micro-batch ", action.micro_batch, ", stage ", stage, ", ", module_.describe(stage)); });
    own.splits = take_parts(own.outputs, axis_.get(), place);
    require_dense(own.outputs, place);
  }
  if (run.schedule.training) {
    Tensors starts;
    std::copy_if(own.outputs.begin(), own.outputs.end(), std::back_inserter(starts),
                 [](const at::Tensor& output) { return output.requires_grad(); });
    own.backward = std::make_unique<StageBackward>(starts, own.inputs.tensors);
  } else if (stage == last) {
    run.passing.erase({stage, action.micro_batch});
    return;
  }
  if (stage < last) {
    keep_apart(own.outputs, own.inputs.tensors);
    for (const at::Tensor& output : own.outputs) own.versions.push_back(version_of(output));
  }
  if (!run.schedule.training) own.inputs = {};
}

// Takes the outputs of the last layer to the loss, and that to where backward begins.
void StageRunner::finish_last(Run& run, const Action& action, Passing& own) {
  const auto index = static_cast<size_t>(action.micro_batch);
  if (run.keep_outputs) {
    Tensors& kept = run.result.outputs[index];
    Tensors of_loss;  // whose operators work on parts
    if (std::any_of(own.outputs.begin(), own.outputs.end(), is_split)) of_loss = own.outputs;
    kept = std::move(own.outputs);  // the only holder is found apart
    gather_values(kept);
    keep_apart(kept, own.inputs.tensors);
    own.outputs = of_loss.empty() ? kept : std::move(of_loss);
  }
  // Asked for also where there is no loss: sources of all calls are then at the same place.
  const MicroBatch& batch = micro_batch(run, action.micro_batch);
  if (run.with_loss) {
    own.outputs = {loss(action.micro_batch, own.outputs, batch.labels)};
    Tensors value = {own.outputs[0].detach()};
    gather_values(value);
    run.result.losses[index] = value[0];
  }
  use_up(run, action.micro_batch);
  if (!run.schedule.training) return;
  require(own.outputs[0].requires_grad(), "pipeline: the loss has no graph: expected a tensor computed from trainable ",
          "parameters, found ", describe(own.outputs[0]));
  own.outputs = {run.callbacks.root(own.outputs[0])};
}

at::Tensor StageRunner::loss(int micro_batch, const Tensors& outputs, const Tensors& labels) const {
  const at::Tensor loss = with_place([&] { return cat("micro-batch ", micro_batch, ", loss: "); },
                                     [&] { return labels.empty() ? without("labels") : ""; },
                                     [&] { return module_.options().loss(outputs, labels); });
  require(loss.defined() && loss.numel() == 1, "micro-batch ", micro_batch, ": expected a scalar loss, found ",
          describe(loss), "; reduce it, for example with loss.mean()");
  return loss;
}

// `read`: the next stage has read them, and may have changed those without a gradient, as a layer may with its inputs.
void StageRunner::require_outputs_unchanged(int stage, int micro_batch, const Passing& passing, bool read) const {
  for (size_t i = 0; i < passing.outputs.size(); ++i) {
    if (read && !passing.outputs[i].requires_grad()) continue;
    require_unchanged(passing.outputs[i], passing.versions.at(i), i, lazy([&] {
                        return cat("micro-batch ", micro_batch, ", output of stage ", stage, ", ",
                                   module_.describe(stage));
                      }));
  }
}

std::string StageRunner::backward_place(const Action& action) const {
  return cat("micro-batch ", action.micro_batch, ", backward of stage ", action.stage, ", ",
             module_.describe(action.stage), ": ");
}

void StageRunner::backward(Run& run, const Action& action) {
  const int stage = action.stage;
  const int last = run.schedule.stages() - 1;
  Passing& own = run.passing.at({stage, action.micro_batch});
  Tensors gradients;
  if (stage == last) {
    gradients = {at::ones_like(own.outputs[0])};
  } else if (here(run, stage + 1)) {
    require_outputs_unchanged(stage, action.micro_batch, own, /*read=*/true);
    Passing& next = run.passing.at({stage + 1, action.micro_batch});
    for (size_t i = 0; i < own.outputs.size(); ++i) {
      if (!own.outputs[i].requires_grad()) continue;
      gradients.push_back(next.gradients[i].defined() ? next.gradients[i] : at::zeros_like(own.outputs[i]));
    }
    next.gradients.clear();
    next.inputs = {};
    if (!next.backward) run.passing.erase({stage + 1, action.micro_batch});
  } else {
    gradients = messages_.gradient(route(run, action, stage, stage + 1));
    run.arrived = std::chrono::steady_clock::now();
  }
  own.outputs.clear();
  --run.passes_left;
  const bool splits = action.kind == ActionKind::kBackwardInput && own.backward->can_split();
  const auto pass = [&] {
    own.gradients =
        with_place([&] { return backward_place(action); },
                   [&] { return splits ? own.backward->inputs_only(gradients) : own.backward->whole(gradients); });
  };
  if (splits) {
    ++run.passes_left;  // its weights are still to come
    run.callbacks.inputs_only(pass);
  } else {
    run.callbacks.accumulate(action, run.passes_left == 0, pass);
    own.backward.reset();
  }
  gather_values(own.gradients);  // those of plain inputs that a function of the program read beside split tensors
  keep_apart(own.gradients, gradients);
  if (!splits && stage == 0) run.passing.erase({stage, action.micro_batch});
}

void StageRunner::backward_weight(Run& run, const Action& action) {
  const auto found = run.passing.find({action.stage, action.micro_batch});
  // Nothing is left where the first pass had to do all of it.
  if (found == run.passing.end() || !found->second.backward) return;
  Passing& own = found->second;
  --run.passes_left;
  run.callbacks.accumulate(action, run.passes_left == 0, [&] {
    with_place([&] { return backward_place(action); }, [&] { own.backward->weights(); });
  });
  own.backward.reset();
  if (own.inputs.tensors.empty()) run.passing.erase(found);
}

void StageRunner::record(const Action& action, std::chrono::steady_clock::time_point start) {
  if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  const auto seconds = [](std::chrono::steady_clock::time_point at) {
    return std::chrono::duration<double>(at.time_since_epoch()).count();
  };
  traced_.push_back({action, seconds(start), seconds(std::chrono::steady_clock::now())});
}

}  // namespace ds::pipeline
