#include "engine/report/parity_record.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "comm/agreement.h"
#include "comm/meeting/environment_reader.h"
#include "config/config_source.h"
#include "core/check.h"
#include "core/log.h"
#include "core/number_text.h"
#include "core/parity/parity_names.h"
#include "core/parity/recorded_run.h"
#include "core/text.h"
#include "dsengine/engine.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

std::string variable(const char* name) { return comm::process_environment(name).value_or(std::string()); }

// Throws for keys whose effect one rank with more accumulation does not have.
void require_repeatable(const ordered_json& config, const std::string& file) {
  const auto refuse = [&](const char* key, const char* why) {
    throw ConfigError(cat("parity: ", file, ": ", key, ": ", why, "; remove the key for the comparison"));
  };
  const auto is_on = [&](const char* key) { return config.contains(key) && config[key] == true; };
  if (is_on("sync_batchnorm")) {
    refuse("sync_batchnorm", "statistics are of the batches of all ranks, which one rank takes one after the other");
  }
  if (config.contains("gradient_allreduce_op") && config["gradient_allreduce_op"] != "mean") {
    refuse("gradient_allreduce_op", "a sum over ranks is no mean over the micro-batches of one rank");
  }
  if (config.contains("gradient_compression")) {
    refuse("gradient_compression", "gradients that are sent with loss are others by design");
  }
  if (config.contains("managed_gradient_accumulation") && config["managed_gradient_accumulation"] == false) {
    refuse("managed_gradient_accumulation", "the program ends its steps itself, and one rank needs longer ones");
  }
  if (config.contains("elasticity")) refuse("elasticity", "the batch of one rank is not that of many");
}

// Returns the parameters that are trained, each under its first name, as the module has them.
std::vector<std::pair<std::string, at::Tensor>> trained_parameters(const ModelState& state) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : state.module->named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), parameter);
    }
  }
  return result;
}

constexpr const char* kFrozenKind = "frozen/";

// Returns what a forward reads beside trained parameters: frozen ones and buffers, with a prefix by kind.
std::vector<std::pair<std::string, at::Tensor>> other_tensors(const ModelState& state) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> result;
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined() && safetensors_holds(tensor.scalar_type()) &&
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
  const auto set = [](at::Generator generator, const at::Tensor& to) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(to);
  };
  set(at::detail::getDefaultCPUGenerator(), states.front());
  if (states.size() > 1) set(at::globalContext().defaultGenerator(state.ranks.device), states.back());
}

std::vector<at::Tensor> generators(const ModelState& state) {
  const auto state_of = [](at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  };
  std::vector<at::Tensor> result = {state_of(at::detail::getDefaultCPUGenerator())};
  if (!state.ranks.device.is_cpu()) {
    result.push_back(state_of(at::globalContext().defaultGenerator(state.ranks.device)));
  }
  return result;
}

bool writes_lines(const ModelState& state) { return !state.tensor || state.tensor->ranks->rank() == 0; }

}  // namespace

std::optional<ParityRun> ParityRun::from_environment() {
  ParityRun run{.folder = variable(kParityFolderVariable),
                .source = {},
                .like = variable(kParityLikeVariable),
                .ends_process = true};
  if (run.folder.empty()) return std::nullopt;
  const std::string file = variable(kParityConfigVariable);
  const std::string steps = variable(kParityStepsVariable);
  run.steps = parse_whole_number(steps).value_or(0);
  require<ConfigError>(run.steps > 0, kParityStepsVariable,
                       ": expected the number of steps to record, at least 1, found \"", steps, "\"");
  require<ConfigError>(!file.empty(), kParityConfigVariable, ": expected the path of a ds_config, found none");
  run.source = config::ConfigSource(std::filesystem::path(file));
  return run;
}

config::ConfigSource ParityRun::config() const {
  ordered_json config = config::ConfigReader::read(source).root;
  require<ConfigError>(config.is_object(), source.name(), ": expected a JSON object");
  require_repeatable(config, source.name());
  if (like.empty()) return source;
  const RecordedLayout layout = read_layout(like);
  config.erase("train_batch_size");
  config["train_micro_batch_size_per_gpu"] = layout.micro_batch;
  config["gradient_accumulation_steps"] = layout.accumulation * layout.data_ranks;
  config["zero_optimization"] = {{"stage", 0}};
  config.erase("tensor_parallel");
  return config;
}

ParityRecord::ParityRecord(ParityRun run, const ModelState& state, const Progress& progress,
                           const config::DsConfig& config, const std::function<void(int rank)>& seed)
    : run_(std::move(run)), state_(state), progress_(progress) {
  static std::atomic<bool> taken = false;
  require(!run_.ends_process || !taken.exchange(true), "ds-launch parity: expected a program with one engine, found a ",
          "second one: which of them belong together is not known");
  require(!state.pipeline, "parity: expected a model that each rank can run, found a ",
          "pipeline::PipelineModule, whose gradients cannot be read between backward() and step()");
  require(state.plan.trains, "parity: expected an engine that trains, found one without an optimizer");
  const comm::Communicator& world = *state.ranks.world;
  if (!run_.like.empty()) {
    require(world.size() == 1, kParityLikeVariable, ": expected one rank, found ", world.size());
    stands_for_ = read_layout(run_.like).data_ranks;
    if (seed) {
      const std::vector<at::Tensor> first = generators(state);
      streams_.push_back(first);
      for (int64_t rank = 1; rank < stands_for_; ++rank) {
        seed(static_cast<int>(rank));
        streams_.push_back(generators(state));
      }
      set_generators(state, first);
    }
  } else if (world.rank() == 0) {
    const ordered_json layout = {{"data_ranks", state.ranks.part->size()},
                                 {"micro_batch", config.train_micro_batch_size_per_gpu},
                                 {"accumulation", config.gradient_accumulation_steps},
                                 {"tensor_ranks", state.ranks.tensor_ranks()},
                                 {"stage", config.zero_optimization.stage},
                                 {"dtype", name_of(config.model_dtype())}};
    classic_stream<std::ofstream>(parity_path(run_.folder, kParityLayoutFile)) << layout.dump(2) << '\n';
  }
  if (writes_lines(state)) {
    lines_ = classic_stream<std::ofstream>(parity_path(run_.folder, parity_losses_file(state.ranks.part->rank())));
  }
}

void ParityRecord::start(Engine& engine) {
  if (state_.ranks.world->rank() == 0) {
    int64_t elements = 0;
    for (const zero::Parameter& parameter : state_.parameters) {
      elements += c10::multiply_integers(parameter.whole_sizes());
    }
    const auto bytes = static_cast<double>(elements * (2 * run_.steps + 1)) *
                       static_cast<double>(c10::elementSize(recorded_dtype(state_)));
    log::info("parity: ", run_.source.name(), ", ",
              run_.like.empty() ? std::string("as it is") : cat("on one rank in the place of ", stands_for_), ": ",
              run_.steps, " steps are written to ", run_.folder, " (", fixed(bytes / (1 << 20), 1), " MiB)",
              run_.ends_process ? ", then the process ends" : "");
  }
  if (!run_.like.empty()) take_over_start(engine);
  write_start(engine);
  open_file(0, /*with_gradients=*/false);
  write(engine, Kind::kWeights);
  if (file_) file_->commit(/*durable=*/false);
  file_.reset();
}

void ParityRecord::take_over_start(Engine& engine) {
  const at::NoGradGuard no_grad;
  const SafetensorsFile weights(parity_path(run_.like, parity_step_file(0)));
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    engine.safe_set_full_fp32_param(parameter, weights.tensor(kParityWeight + name).to(state_.ranks.device));
  }
  const SafetensorsFile others(parity_path(run_.like, kParityStartFile));
  for (const auto& [name, tensor] : other_tensors(state_)) tensor.copy_(others.tensor(name));
}

void ParityRecord::write_start(Engine& engine) {
  const at::NoGradGuard no_grad;
  std::vector<SafetensorsWriter::Header> headers;
  const auto tensors = other_tensors(state_);
  for (const auto& [name, tensor] : tensors) {
    headers.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  }
  std::optional<SafetensorsWriter> file;
  if (state_.ranks.world->rank() == 0) file.emplace(parity_path(run_.folder, kParityStartFile), headers);
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
  if (state_.ranks.world->rank() != 0) return;
  std::vector<SafetensorsWriter::Header> headers;
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    const auto add = [&, &of = name, &like = parameter](const char* kind) {
      headers.push_back({.name = kind + of, .dtype = recorded_dtype(state_), .sizes = like.sizes().vec()});
    };
    if (with_gradients) add(kParityGradient);
    add(kParityWeight);
  }
  file_ = std::make_unique<SafetensorsWriter>(parity_path(run_.folder, parity_step_file(step)), headers);
}

void ParityRecord::write(Engine& engine, Kind kind) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : trained_parameters(state_)) {
    const bool is_gradient = kind == Kind::kGradients;
    const at::Tensor value =
        is_gradient ? engine.safe_get_full_grad(parameter) : engine.safe_get_full_fp32_param(parameter);
    if (!file_) continue;
    file_->write((is_gradient ? kParityGradient : kParityWeight) + name,
                 value.to(recorded_dtype(state_)).reshape(parameter.sizes()).contiguous());
  }
}

void ParityRecord::before_step(Engine& engine) {
  at_boundary_ = engine.is_gradient_accumulation_boundary();
  if (!at_boundary_) return;
  open_file(++step_, /*with_gradients=*/true);
  write(engine, Kind::kGradients);
}

void ParityRecord::after_step(Engine& engine) {
  if (at_boundary_) {
    write_losses(engine);
    write(engine, Kind::kWeights);
    if (file_) file_->commit(/*durable=*/false);
    file_.reset();
    if (step_ == run_.steps && run_.ends_process) end_process();
  }
  take_turn();
}

void ParityRecord::write_losses(Engine& engine) {
  const std::optional<double> norm = engine.get_global_grad_norm();
  ordered_json losses = ordered_json::array();
  for (const at::Tensor& loss : losses_) {
    losses.push_back(loss.defined() ? loss.to(at::kDouble).item<double>() : std::numeric_limits<double>::quiet_NaN());
  }
  losses_.clear();
  if (!lines_.is_open()) return;
  const auto optional = [](const std::optional<double>& number) { return number ? ordered_json(*number) : nullptr; };
  lines_ << ordered_json({{"step", step_},
                          {"losses", losses},
                          {"loss", optional(progress_.loss)},
                          {"norm", optional(norm)},
                          {"applied", progress_.step_applied}})
                .dump()
         << std::endl;
  require<IoError>(lines_.good(), "parity: ", run_.folder, ": the losses of step ", step_, " could not be written");
}

void ParityRecord::take_turn() {
  if (streams_.size() < 2) return;
  streams_[static_cast<size_t>(turn_)] = generators(state_);
  turn_ = (turn_ + 1) % stands_for_;
  set_generators(state_, streams_[static_cast<size_t>(turn_)]);
}

// Ends the process here, because the program may have hours of training before it.
void ParityRecord::end_process() {
  comm::largest_of_ranks(0, state_.ranks.device, *state_.ranks.world, "the end of a parity run");
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(0);
}

}  // namespace ds::engine
