#include "model/checkpoint/state_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "checkpoint/source/part_reader.h"
#include "core/log.h"

namespace ds::engine {
namespace {

using checkpoint::Source;

// Calls `read` with memory on the host for the values of `target`, which may be anywhere and in any order.
template <class Read>
void read_into(const at::Tensor& target, const Read& read) {
  if (target.is_cpu() && target.is_contiguous()) return read(target);
  const at::Tensor values = at::empty(target.sizes(), target.scalar_type());
  read(values);
  at::Tensor(target).copy_(values);
}

void read_flat(Source& source, const std::string& path, int64_t offset, const at::Tensor& flat) {
  read_into(flat, [&](const at::Tensor& values) { source.read(path, offset, values); });
}

// Elements from `offset` on of what this rank has of a parameter.
void read_own(Source& source, const std::string& path, const zero::Parameter& parameter, int64_t offset,
              const at::Tensor& target) {
  if (!parameter.part) return read_flat(source, path, offset, target);
  read_into(target,
            [&](const at::Tensor& values) { checkpoint::read_part(source, path, *parameter.part, offset, values); });
}

// Reads the runs of a range into `flat`, which holds the range. `path_of(parameter, run)`: where the values of a run
// are; empty: they stay.
template <class PathOf>
void read_runs(Source& source, const zero::BucketLayout& layout, const BucketRange& range,
               const std::vector<zero::Parameter>& parameters, const at::Tensor& flat, const PathOf& path_of) {
  for_each_run(layout, range, [&](const Segment& run, int64_t position) {
    const zero::Parameter& parameter = parameters[static_cast<size_t>(run.parameter)];
    const std::string path = path_of(parameter, run);
    if (path.empty()) return;
    read_own(source, path, parameter, run.parameter_offset, flat.narrow(0, position, run.length));
  });
}

}  // namespace

void StateReader::read() {
  const ModelOptimizer& optimizer = model_.optimizer;
  has_average_ = model_.average && !options_.module_only && source_.state().ema_updates.has_value();
  for (size_t b = 0; b < model_.buckets.size(); ++b) read_trained(b);
  for (size_t f = 0; f < model_.frozen_buckets.size(); ++f) {
    if (model_.frozen_buckets[f].kept_slice().bits() == 0) read_frozen_bucket(f);
  }
  read_frozen_parameters();
  for (const auto& item : model_.module->named_buffers()) {
    const std::string path = buffer_for(source_, model_.ranks.world->rank(), fit_.same_ranks(), item.key());
    if (!path.empty()) at::Tensor(item.value().detach()).copy_(source_.tensor(path));
  }
  if (!options_.with_states) forget_own_steps();
  if (options_.module_only) {
    model_.fp8->forget();  // they are of the weights before
    return;
  }
  if (options_.with_states && optimizer.steps_on_parameters()) load_client_optimizer(model_, source_);
  if (options_.with_states && optimizer.own) read_optimizer_memory();
  if (model_.gradients.reduction) read_compression_memory();
  read_fp8_memory();
  load_generators(model_, source_, fit_.same_ranks());
}

void StateReader::read_trained(size_t b) {
  const zero::ParameterBucket& bucket = model_.buckets[b];
  const at::Tensor& master = model_.masters[b];
  const BucketRange range = held_range(model_, b, model_.plan.partition_optimizer);
  use_bucket(model_, b, /*changes=*/true, [&] {
    read_runs(source_, bucket.layout(), range, model_.parameters, master,
              [&](const zero::Parameter& parameter, const Segment&) { return fit_.weight(parameter.name); });
    const at::Tensor own = model_.own_part(b);
    if (!own.is_alias_of(master)) at::Tensor(own).copy_(master);
    if (model_.average) read_average(b, range);
    if (!options_.with_states) return;
    for (const auto& [kind, values] : model_.optimizer.states(b)) {
      read_runs(
          source_, bucket.layout(), range, model_.parameters, values,
          [&, &name = kind](const zero::Parameter&, const Segment& run) { return fit_.state_of(name, run).first; });
    }
  });
}

// Averages of parameters that the checkpoint lacks begin with the weights; over others, those of what is read.
void StateReader::read_average(size_t b, const BucketRange& range) {
  const at::Tensor& average = model_.average->values(b);
  if (options_.over) {
    const at::Tensor& master = model_.masters[b];
    for_each_run(model_.buckets[b].layout(), range, [&](const Segment& run, int64_t position) {
      if (fit_.weight(model_.parameters[static_cast<size_t>(run.parameter)].name).empty()) return;
      average.narrow(0, position, run.length).copy_(master.narrow(0, position, run.length));
    });
    return;
  }
  at::Tensor(average).copy_(model_.masters[b]);
  if (!has_average_) return;
  read_runs(source_, model_.buckets[b].layout(), range, model_.parameters, average,
            [&](const zero::Parameter& parameter, const Segment&) { return fit_.average(parameter); });
}

void StateReader::read_frozen_bucket(size_t f) {
  const zero::ParameterBucket& bucket = model_.frozen_buckets[f];
  const size_t b = model_.buckets.size() + f;
  const BucketRange range = held_range(model_, b, bucket.sharded());
  const at::Tensor flat = bucket.sharded() ? bucket.slice(model_.groups_of(b).shards.rank()) : bucket.flat();
  bucket.kept_slice().use(/*changes=*/true, [&] {
    read_runs(source_, bucket.layout(), range, model_.frozen, flat,
              [&](const zero::Parameter& parameter, const Segment&) { return fit_.weight(parameter.name); });
  });
}

void StateReader::read_frozen_parameters() {
  for (const zero::Parameter& parameter : model_.frozen_outside_buckets()) {
    const std::string& path = fit_.weight(parameter.name);
    if (!path.empty()) read_own(source_, path, parameter, 0, parameter.tensor.detach());
  }
}

void StateReader::read_encoded_bucket(size_t f) {
  const size_t b = model_.buckets.size() + f;
  for (const zero::Parameter& parameter : model_.frozen_buckets[f].parameters()) {
    const std::string& path = fit_.weight(parameter.name);
    if (path.empty()) continue;
    const at::Tensor values = at::empty(parameter.tensor.sizes(), parameter.tensor.scalar_type());
    read_own(source_, path, parameter, 0, values);
    parameter.tensor.detach().copy_(values);
  }
  model_.gatherer->held().keep_changes(b);
}

std::exception_ptr StateReader::read_encoded() {
  std::exception_ptr failure;
  for (size_t f = 0; f < model_.frozen_buckets.size(); ++f) {
    if (model_.frozen_buckets[f].kept_slice().bits() == 0) continue;
    const size_t b = model_.buckets.size() + f;
    model_.gatherer->held().gather(b);
    try {
      read_encoded_bucket(f);
    } catch (...) {
      failure = std::current_exception();
      model_.gatherer->held().forget_changes(b);
    }
    model_.gatherer->held().drop(b);
  }
  return failure;
}

// All of it, or nothing where the checkpoint lacks a part or has one of another shape.
bool StateReader::read_memory(const NamedTensors& memory) {
  const bool fits = std::all_of(memory.begin(), memory.end(), [&](const auto& entry) {
    return source_.contains(entry.first) && source_.info(entry.first).sizes == entry.second.sizes();
  });
  if (!fits) return false;
  for (const auto& [path, values] : memory) read_flat(source_, path, 0, values);
  return true;
}

// Memory that only other ranks, or another layout, have begins anew.
void StateReader::read_optimizer_memory() {
  const std::string missing =
      load_shared_optimizer_memory(model_, source_, [this](const std::string& name) { return fit_.stored_name(name); });
  if (!missing.empty() && model_.ranks.part->rank() == 0) {
    log::warning("load_checkpoint: ", source_.location(), ": has no ", missing, ", which ", model_.optimizer.name(),
                 " keeps for all ranks; what it has stays as it is");
  }
  const NamedTensors memory = optimizer_memory(model_);
  has_rank_states_ = fit_.same_ranks() && read_memory(memory);
  if (!has_rank_states_ && !memory.empty() && model_.ranks.world->rank() == 0) {
    log::warning("load_checkpoint: ", source_.location(),
                 ": errors of the compression are of other ranks or another layout; they begin at 0");
  }
}

// Forgets what ranks remember of steps of their own and of compression: it belongs to the weights that have gone.
void StateReader::forget_own_steps() const {
  if (model_.optimizer.own) model_.optimizer.own->states_changed(/*rank_states=*/false);
  if (model_.gradients.reduction) model_.gradients.reduction->forget();
}

void StateReader::read_compression_memory() {
  const NamedTensors memory = compression_memory(model_);
  if (options_.with_states && fit_.same_ranks() && read_memory(memory)) return;
  model_.gradients.reduction->forget();
  if (model_.ranks.world->rank() == 0 && !memory.empty()) {
    log::info("load_checkpoint: ", source_.location(), ": gradient_compression begins without what it remembered: ",
              "the checkpoint has none for these ranks and buckets");
  }
}

// Scales belong to the weights that have come, whatever becomes of the optimizer.
void StateReader::read_fp8_memory() const {
  const std::string missing = load_fp8_memory(model_, source_);
  if (missing.empty() || model_.fp8->options().recipe == fp8::Recipe::kCurrent) return;
  if (model_.ranks.layer_ranks().rank() != 0) return;
  log::info("load_checkpoint: ", source_.location(), ": has no scales of the FP8 layer ", missing,
            "; layers without any begin with those of the tensors at hand");
}

void StateReader::publish() const {
  zero::ParameterAccess& access = *model_.access;
  for (size_t b = 0; b < model_.buckets.size(); ++b) access.updated(b);
  // The copies that the ranks of a node keep of frozen buckets have the values before.
  for (size_t f = 0; f < model_.frozen_buckets.size(); ++f) {
    if (model_.frozen_buckets[f].sharded()) access.updated(model_.buckets.size() + f);
  }
  access.end_update();
  access.wait_all();
  access.change_mode();
}

}  // namespace ds::engine
