#include "engine/parity_record.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/log.h"
#include "core/number_text.h"
#include "core/parity/parity_names.h"
#include "core/random_streams.h"
#include "core/text.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/stages/tied_weights.h"
#include "model/state/finished_gradients.h"
#include "model/state/parameter_values.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

constexpr const char* kFrozenKind = "frozen/";

// Returns the parameters that are trained, each under its first name, as the module has them. Copies of weights that an
// earlier rank of the pipeline has are left out.
std::vector<std::pair<std::string, at::Tensor>> trained_parameters(const ModelState& state) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : state.module->named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.requires_grad() && !state.is_copy(item.key()) &&
        seen.insert(parameter.unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), parameter);
    }
  }
  return result;
}

// Returns what a forward reads beside trained parameters: frozen ones and buffers, with a prefix by kind.
std::vector<std::pair<std::string, at::Tensor>> other_tensors(const ModelState& state) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> result;
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined() && safetensors_holds(tensor.scalar_type()) && !state.is_copy(name) &&
        seen.insert(tensor.unsafeGetTensorImpl()).second) {
      result.emplace_back(kind + name, tensor);
    }
  };
  for (const auto& item : state.module->named_parameters()) {
    if (!item.value().requires_grad()) add(kFrozenKind, item.key(), item.value());
  }
  for (const auto& item : state.module->named_buffers()) add("buffer/", item.key(), item.value());
  return result;
}

at::ScalarType recorded_dtype(const ModelState& state) {
  return state.plan.master_dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
}

void set_generators(const ModelState& state, const std::vector<at::Tensor>& states) {
  const std::vector<at::Generator> all = default_generators(state.ranks.device);
  for (size_t i = 0; i < std::min(all.size(), states.size()); ++i) set_generator_state(all[i], states[i]);
}

std::vector<at::Tensor> generators(const ModelState& state) {
  std::vector<at::Tensor> result;
  for (const at::Generator& generator : default_generators(state.ranks.device)) {
    result.push_back(generator_state(generator));
  }
  return result;
}

// Whether the rank writes the tensors of its part of a pipeline, or the whole model.
bool writes_tensors(const Ranks& ranks) { return ranks.part->rank() == 0 && ranks.is_first_of_tensor_axis(); }

// Whether the rank has the losses of its data-parallel rank.
bool writes_lines(const ModelState& state) {
  return state.ranks.is_first_of_tensor_axis() && has_last_stage(state.pipeline.get());
}

RecordedLayout layout_of(const ModelState& state, const config::DsConfig& config) {
  return {.data_ranks = state.ranks.part->size(),
          .micro_batch = config.train_micro_batch_size_per_gpu,
          .accumulation = config.gradient_accumulation_steps,
          .tensor_ranks = state.ranks.tensor_ranks(),
          .pipe_ranks = state.pipeline_ranks(),
          .stage = config.zero_optimization.stage,
          .dtype = name_of(config.model_dtype())};
}

void write_layout(const RecordedLayout& layout, const std::string& folder) {
  const ordered_json text = {{"data_ranks", layout.data_ranks},
                             {"micro_batch", layout.micro_batch},
                             {"accumulation", layout.accumulation},
                             {"tensor_ranks", layout.tensor_ranks},
                             {"pipe_ranks", layout.pipe_ranks},
                             {"stage", layout.stage},
                             {"dtype", layout.dtype}};
  classic_stream<std::ofstream>(parity_path(folder, kParityLayoutFile)) << text.dump(2) << '\n';
}

BatchTape tape_of(const ParityRun& run, const ModelState& state) {
  if (!run.keeps_batches) return BatchTape({}, {});
  if (!run.like.empty()) return BatchTape(run.like, {.reads = true});
  const bool writes = state.ranks.is_first_of_tensor_axis();
  return BatchTape(run.folder, {.writes_inputs = writes && has_first_stage(state.pipeline.get()),
                                .writes_labels = writes && has_last_stage(state.pipeline.get())});
}

// A tensor of a file that each rank of the pipeline of another run has written.
at::Tensor tensor_of(const std::vector<SafetensorsFile>& files, const std::string& name) {
  for (const SafetensorsFile& file : files) {
    if (file.contains(name)) return file.tensor(name);
  }
  throw IoError(cat("parity: ", files.front().path(), ": expected the tensor ", name,
                    " of the first run, found none: the program builds another model on another number of ranks"));
}

std::vector<SafetensorsFile> open_files(int64_t pipe_ranks, const std::function<std::string(int64_t)>& path) {
  std::vector<SafetensorsFile> files;
  for (int64_t rank = 0; rank < pipe_ranks; ++rank) files.emplace_back(path(rank));
  return files;
}

void write_states(const std::string& path, const std::vector<at::Tensor>& states) {
  std::vector<SafetensorsWriter::Header> headers;
  for (size_t i = 0; i < states.size(); ++i) {
    headers.push_back({.name = cat(i), .dtype = states[i].scalar_type(), .sizes = states[i].sizes().vec()});
  }
  SafetensorsWriter file(path, headers);
  for (size_t i = 0; i < states.size(); ++i) file.write(cat(i), states[i]);
  file.commit(/*durable=*/false);
}

std::vector<at::Tensor> read_states(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<at::Tensor> states;
  for (size_t i = 0; file.contains(cat(i)); ++i) states.push_back(file.tensor(cat(i)).clone());
  return states;
}

}  // namespace

ParityRecord::ParityRecord(ParityRun run, const ModelState& state, const Progress& progress,
                           const config::DsConfig& config)
    : run_(std::move(run)),
      state_(state),
      progress_(progress),
      layout_(run_.like.empty() ? layout_of(state, config) : read_layout(run_.like)),
      tape_(tape_of(run_, state)) {
  static std::atomic<bool> taken = false;
  require(!run_.ends_process || !taken.exchange(true), "ds-launch parity: expected a program with one engine, found a ",
          "second one: which of them belong together is not known");
  require(state.plan.trains, "parity: expected an engine that trains, found one without an optimizer");
  require<ConfigError>(!state.ranks.sequence, "parity: sequence_parallel_size: expected 1, found ",
                       state.ranks.sequence_ranks(), ": the runs that are compared have whole sequences");
  const auto& norms = state.ranks.groups.norms;
  require<ConfigError>(!norms || norms->size() == 1 || run_.takes_global_batches,
                       "parity: expected layers that see one rank's batch alone, found BatchNorm over ",
                       norms ? norms->size() : 1, " ranks (ds::convert_sync_batchnorm), whose statistics one rank ",
                       "cannot repeat, because it takes their batches one after the other; give --global_batches to ",
                       "let it take them as one, or leave the conversion out to compare the rest");
  const comm::Communicator& world = *state.ranks.world;
  require(!run_.is_reference() || world.size() == 1, kParityLikeVariable, ": expected one rank, found ", world.size());
  if (world.rank() == 0) write_layout(layout_of(state, config), run_.folder);
  first_generators_ = generators(state);
  if (writes_lines(state)) {
    lines_ = classic_stream<std::ofstream>(parity_path(run_.folder, parity_losses_file(state.ranks.part->rank())));
  }
}

void ParityRecord::say_what_it_writes() const {
  int64_t elements = 0;
  for (const zero::Parameter& parameter : state_.parameters) {
    elements += c10::multiply_integers(parameter.whole_sizes());
  }
  const int64_t bytes =
      elements * (2 * run_.steps + 1) * static_cast<int64_t>(c10::elementSize(recorded_dtype(state_)));
  std::error_code none;
  const std::filesystem::space_info room = std::filesystem::space(run_.folder, none);
  require<IoError>(none || room.available > static_cast<uintmax_t>(bytes), "parity: ", run_.folder, ": expected room ",
                   "for the record of this run, ", bytes, " bytes, found ", room.available, " bytes; give --folder on ",
                   "another disk, or fewer --steps");
  const char* const as = run_.like.empty() ? "as it is" : "with its batches in another order";
  log::info("parity: ", run_.source.name(), ", ",
            run_.is_reference() ? cat("on one rank in the place of ", layout_.data_ranks) : std::string(as), ": ",
            run_.steps, " steps are written to ", run_.folder, " (", fixed(static_cast<double>(bytes) / (1 << 20), 1),
            " MiB", state_.pipeline_ranks() > 1 ? " of the first stage, as much of the others" : "",
            tape_.writes() ? ", and the batches that the engine sees" : "", ")",
            run_.ends_process ? ", then the process ends" : "");
}

void ParityRecord::start(Engine& engine) {
  if (writes_tensors(state_.ranks)) say_what_it_writes();
  if (!run_.like.empty()) take_over_start(engine);
  write_start(engine);
  open_file(0, /*with_gradients=*/false);
  write(engine, Kind::kWeights);
  if (file_) file_->commit(/*durable=*/false);
  file_.reset();
  if (!state_.pipeline) follow_generators();
}

void ParityRecord::take_over_start(Engine& engine) {
  const at::NoGradGuard no_grad;
  const auto weights =
      open_files(layout_.pipe_ranks, [&](int64_t rank) { return parity_path(run_.like, parity_step_file(0, rank)); });
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    // A weight that several stages have a copy of cannot be set; their ranks have agreed on its values.
    if (state_.pipeline_ranks() > 1 && tie_of(state_.pipeline->tied, name) >= 0) continue;
    engine.safe_set_full_fp32_param(parameter, tensor_of(weights, kParityWeight + name).to(state_.ranks.device));
  }
  const auto others =
      open_files(layout_.pipe_ranks, [&](int64_t rank) { return parity_path(run_.like, parity_start_file(rank)); });
  for (const auto& [name, tensor] : other_tensors(state_)) {
    if (!name.starts_with(kFrozenKind)) {
      tensor.copy_(tensor_of(others, name));
      continue;
    }
    const auto scope = engine.gathered_parameters({tensor}, /*modifier_rank=*/0);
    tensor.copy_(tensor_of(others, name));
  }
}

void ParityRecord::write_start(Engine& engine) {
  const at::NoGradGuard no_grad;
  std::vector<SafetensorsWriter::Header> headers;
  const auto tensors = other_tensors(state_);
  for (const auto& [name, tensor] : tensors) {
    headers.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  }
  std::optional<SafetensorsWriter> file;
  if (writes_tensors(state_.ranks)) {
    file.emplace(parity_path(run_.folder, parity_start_file(state_.pipeline_rank())), headers);
  }
  for (const auto& [name, tensor] : tensors) {
    const auto write = [&, &of = name, &values = tensor] {
      if (file) file->write(of, values.detach().contiguous());
    };
    if (!name.starts_with(kFrozenKind)) {
      write();
      continue;
    }
    const auto scope = engine.gathered_parameters({tensor});
    write();
  }
  if (file) file->commit(/*durable=*/false);
}

void ParityRecord::open_file(int64_t step, bool with_gradients) {
  if (!writes_tensors(state_.ranks)) return;
  std::vector<SafetensorsWriter::Header> headers;
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    const auto add = [&, &of = name, &like = parameter](const char* kind) {
      headers.push_back({.name = kind + of, .dtype = recorded_dtype(state_), .sizes = like.sizes().vec()});
    };
    if (with_gradients) add(kParityGradient);
    add(kParityWeight);
  }
  file_ = std::make_unique<SafetensorsWriter>(parity_path(run_.folder, parity_step_file(step, state_.pipeline_rank())),
                                              headers);
}

void ParityRecord::write(Engine& engine, Kind kind) {
  const at::NoGradGuard no_grad;
  Engine::Impl& impl = EngineAccess::impl_of(engine);
  const auto gradient = [&](const at::Tensor& parameter) {
    const ParameterValues values(state_, parameter, "parity");
    return values.whole(impl.finished_gradient(values, "parity")) / impl.scaled_backward->gradient_scale();
  };
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    const bool is_gradient = kind == Kind::kGradients;
    const at::Tensor value = is_gradient ? gradient(parameter) : engine.safe_get_full_fp32_param(parameter);
    if (!file_) continue;
    file_->write((is_gradient ? kParityGradient : kParityWeight) + name,
                 value.to(recorded_dtype(state_)).reshape(parameter.sizes()).contiguous());
  }
}

TapePlace ParityRecord::place(int64_t micro_batch) const {
  if (run_.is_reference()) {
    if (run_.takes_global_batches) return {.data_rank = 0, .micro_batch = micro_batch};
    return {.data_rank = micro_batch % layout_.data_ranks, .micro_batch = micro_batch / layout_.data_ranks};
  }
  const int64_t in_step = micro_batch % layout_.accumulation;
  const int64_t taken = place_in_step(layout_, run_.order, state_.ranks.part->rank(), in_step);
  return {.data_rank = taken % layout_.data_ranks, .micro_batch = micro_batch - in_step + taken / layout_.data_ranks};
}

// Ranks that are threads share the generators, which then stay as they are.
void ParityRecord::follow_generators() {
  if (!run_.ends_process) return;
  const TapePlace at = place(micro_batch_);
  const int64_t pipe_rank = run_.is_reference() ? 0 : state_.pipeline_rank();
  const std::string file = parity_generator_file(at.data_rank, pipe_rank, at.micro_batch);
  if (run_.like.empty()) {
    if (state_.ranks.is_first_of_tensor_axis()) {
      write_states(parity_path(run_.folder, file), generators(state_));
    }
    return;
  }
  const std::string path = parity_path(run_.like, file);
  std::error_code none;
  if (std::filesystem::is_regular_file(path, none)) set_generators(state_, read_states(path));  // else it was over
}

at::Tensor ParityRecord::given(const at::Tensor& input) {
  // Without gradients the program evaluates; a pipeline's batches are taken as a whole.
  if (!run_.keeps_batches || state_.pipeline || !input.defined() || !at::GradMode::is_enabled()) return input;
  return tape_.take(input, place(micro_batch_), inputs_++);
}

pipeline::MicroBatch ParityRecord::given(const pipeline::BatchSource& next) {
  follow_generators();
  const TapePlace at = place(micro_batch_++);
  return run_.keeps_batches ? tape_.take(next, at) : next();
}

void ParityRecord::before_step(Engine& engine) {
  EngineAccess::impl_of(engine).order.require(Call::kStep);  // before anything is read
  at_boundary_ = engine.is_gradient_accumulation_boundary();
  if (at_boundary_) before_update(engine);
}

void ParityRecord::after_step(Engine& engine) {
  if (at_boundary_) after_update(engine);
  ++micro_batch_;
  inputs_ = 0;
  follow_generators();
}

void ParityRecord::before_update(Engine& engine) {
  // Here, because a stage of a pipeline may have nothing to write and yet copies of tied weights.
  EngineAccess::impl_of(engine).update->settle(Update::Next::kRead);
  finish_gradients(state_);
  open_file(++step_, /*with_gradients=*/true);
  write(engine, Kind::kGradients);
}

void ParityRecord::after_update(Engine& engine, const at::Tensor& loss) {
  write_losses(engine, loss);
  write(engine, Kind::kWeights);
  if (file_) file_->commit(/*durable=*/false);
  file_.reset();
  if (step_ == run_.steps && run_.ends_process) end_process();
}

void ParityRecord::write_losses(Engine& engine, const at::Tensor& loss) {
  const std::optional<double> norm = engine.get_global_grad_norm();
  const std::vector<at::Tensor> states = generators(state_);
  draws_ = draws_ || !std::equal(states.begin(), states.end(), first_generators_.begin(), first_generators_.end(),
                                 [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
  ordered_json losses = ordered_json::array();
  for (const at::Tensor& one : losses_) {
    losses.push_back(one.defined() ? one.to(at::kDouble).item<double>() : std::numeric_limits<double>::quiet_NaN());
  }
  losses_.clear();
  if (!lines_.is_open()) return;
  const auto optional = [](const std::optional<double>& number) { return number ? ordered_json(*number) : nullptr; };
  const std::optional<double> mean =
      loss.defined() ? std::optional(loss.to(at::kDouble).item<double>()) : progress_.loss;
  lines_ << ordered_json({{"step", step_},
                          {"losses", losses},
                          {"draws", draws_},
                          {"batches", tape_.count()},
                          {"loss", optional(mean)},
                          {"norm", optional(norm)},
                          {"applied", progress_.step_applied}})
                .dump()
         << std::endl;
  require<IoError>(lines_.good(), "parity: ", run_.folder, ": the losses of step ", step_, " could not be written");
}

// Ends the process here, because the program may have hours of training before it.
void ParityRecord::end_process() {
  comm::largest_of_ranks(0, state_.ranks.device, *state_.ranks.world, "the end of a parity run");
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(0);
}

}  // namespace ds::engine
