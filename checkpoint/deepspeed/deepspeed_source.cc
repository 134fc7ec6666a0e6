#include "checkpoint/deepspeed/deepspeed_source.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <set>

#include "checkpoint/deepspeed/joined_layout.h"
#include "checkpoint/deepspeed/saved_checkpoint.h"
#include "checkpoint/deepspeed/saved_optimizer.h"
#include "checkpoint/source/training_state.h"
#include "core/ascii.h"
#include "core/check.h"
#include "core/log.h"

namespace ds::checkpoint {
namespace {

constexpr int64_t kLargestCount = int64_t{1} << 53;

// Keys of a model_states file that are DeepSpeed's own (engine.py, 0.9 to 0.19).
const std::set<std::string>& own_keys() {
  static const std::set<std::string> kKeys = {"module",
                                              "buffer_names",
                                              "optimizer",
                                              "param_shapes",
                                              "frozen_param_shapes",
                                              "shared_params",
                                              "frozen_param_fragments",
                                              "lr_scheduler",
                                              "data_sampler",
                                              "random_ltd",
                                              "sparse_tensor_module_names",
                                              "csr_tensor_module_names",
                                              "skipped_steps",
                                              "global_steps",
                                              "global_samples",
                                              "dp_world_size",
                                              "mp_world_size",
                                              "checkpoint_parallel_dimensions",
                                              "num_experts",
                                              "ds_autoep_layers",
                                              "autoep_layers",
                                              "universal_checkpoint_info",
                                              "ds_config",
                                              "ds_version"};
  return kKeys;
}

// The entries of `dict` that are plain JSON.
nlohmann::json plain_entries(const PickleValue& dict, const std::set<std::string>& left_out) {
  nlohmann::json result = nlohmann::json::object();
  for (const auto& [key, value] : dict.entries) {
    if (!key->is(PickleKind::kString) || left_out.contains(key->text)) continue;
    const auto name = plain_json(*key);
    auto content = plain_json(*value);
    if (name && content) result[key->text] = std::move(*content);
  }
  return result;
}

nlohmann::json config_of(const PickleField& model) {
  const auto config = model.find("ds_config");
  return config && config->is(PickleKind::kDict) ? plain_entries(config->value(), {}) : nlohmann::json::object();
}

int64_t count_of(const PickleField& model, const char* key) {
  const PickleField field = model.at(key);
  if (field.integer() < 0 || field.integer() > kLargestCount) {
    field.fail(cat("expected a count, found ", field.integer()));
  }
  return field.integer();
}

int64_t integer_in(const nlohmann::json& config, const char* key) {
  return config.contains(key) && config[key].is_number_integer() ? config[key].get<int64_t>() : 0;
}

// `steps` times what each of them counts.
int64_t counted(int64_t steps, int64_t each, const PickleField& model) {
  int64_t product = 0;
  if (__builtin_mul_overflow(steps, each, &product)) model.fail(cat(steps, " steps of ", each, ": no such count"));
  return product;
}

// Micro-batches of an update, as the config gives them or lets them be computed.
int64_t accumulation_steps(const nlohmann::json& config, int64_t ranks) {
  const int64_t given = integer_in(config, "gradient_accumulation_steps");
  if (given > 0) return given;
  const int64_t whole = integer_in(config, "train_batch_size");
  const int64_t micro = integer_in(config, "train_micro_batch_size_per_gpu");
  if (whole <= 0 || micro <= 0 || micro > whole / ranks) return 1;
  return whole / (micro * ranks);
}

std::string precision_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    default:
      return {};
  }
}

// The dtype of the module's first trained parameter that is no buffer. `module`: the module's state dict, of a
// pipeline that of its first layer.
std::string precision_of(const PickleField& model, const PickleField& module) {
  std::set<std::string> others;
  const PickleField buffers = model.at("buffer_names");
  for (size_t i = 0; i < buffers.size(); ++i) others.insert(buffers.item(i).text());
  if (const auto frozen = model.find("frozen_param_shapes")) {
    for (const auto& [name, sizes] : frozen->entries()) others.insert(name);
  }
  for (const auto& [name, field] : module.entries()) {
    if (others.contains(name) || !field.is(PickleKind::kTensor)) continue;
    const std::string precision = precision_name(field.tensor().dtype);
    if (!precision.empty()) return precision;
  }
  return "float32";
}

optimizers::GroupOptions group_options(const PickleField& group) {
  const PickleField betas = group.at("betas");
  return {.lr = group.at("lr").number(),
          .weight_decay = group.at("weight_decay").number(),
          .beta1 = betas.item(0).number(),
          .beta2 = betas.item(1).number(),
          .momentum = 0.0,
          .eps = group.at("eps").number()};
}

// The config's optimizer.type in lower case; empty when the program made the optimizer.
std::string configured_type(const nlohmann::json& config) {
  const auto type = nlohmann::json::json_pointer("/optimizer/type");
  return config.contains(type) && config[type].is_string() ? ascii_lower(config[type].get<std::string>()) : "";
}

// DeepSpeed's own Adam does not say whether weight decay is decoupled; it is unless adam_w_mode is false.
std::string optimizer_type(const PickleField& group, const nlohmann::json& config) {
  if (const auto decoupled = group.find("decoupled_weight_decay")) return decoupled->boolean() ? "AdamW" : "Adam";
  const auto mode = nlohmann::json::json_pointer("/optimizer/params/adam_w_mode");
  const bool plain = configured_type(config) == "adam" && config.contains(mode) && config[mode] == false;
  return plain ? "Adam" : "AdamW";
}

class SavedSteps {
 public:
  explicit SavedSteps(const SavedCheckpoint& saved) : saved_(saved), optimizer_(saved.torch_optimizer()) {}

  // Updates that were applied. DeepSpeed's FusedAdam counts by parameter, and leaves a count of its groups from older
  // versions at 0.
  int64_t count() {
    for (const int64_t index : optimizer_.all_parameters()) {
      if (!optimizer_.has_state(index)) continue;
      if (const PickleField* step = optimizer_.step(index)) take(step_from(*step), *step);
    }
    if (count_) return *count_;
    for (const PickleField& group : optimizer_.groups()) {
      if (const auto step = group.find("step")) take(step_from(*step), *step);
    }
    return count_.value_or(0);
  }

  const SavedOptimizer& optimizer() const { return optimizer_; }

 private:
  void take(int64_t step, const PickleField& where) {
    if (step < 0) where.fail(cat("expected a count of updates, found ", step));
    if (count_ && *count_ != step) {
      where.fail(cat(step, " updates where other parameters had ", *count_,
                     "; parameters that were updated at different "
                     "steps cannot be read"));
    }
    count_ = step;
  }

  int64_t step_from(const PickleField& field) const {
    if (field.is(PickleKind::kInt)) return field.integer();
    double step = 0.0;
    if (field.is(PickleKind::kTensor)) {
      if (field.tensor().numel() != 1) field.fail("expected one number");
      const auto& archive = saved_.stage > 0 ? saved_.optims[0] : saved_.models[0];
      step = archive->tensor(field.tensor()).to(at::kDouble).item<double>();
    } else {
      step = field.number();
    }
    const bool whole = step >= 0.0 && step <= 9e15 && std::floor(step) == step;
    if (!whole) field.fail(cat("expected a count of updates, found ", step));
    return static_cast<int64_t>(step);
  }

  const SavedCheckpoint& saved_;
  SavedOptimizer optimizer_;
  std::optional<int64_t> count_;
};

OptimizerState optimizer_of(const SavedCheckpoint& saved, const nlohmann::json& config) {
  const std::string type = configured_type(config);
  require<IoError>(type.empty() || type == "adam" || type == "adamw", saved.model().where(), ": optimizer \"", type,
                   "\"; only states of Adam and AdamW can be read");
  SavedSteps steps(saved);
  OptimizerState state{.type = {}, .step_count = steps.count(), .groups = {}};
  for (const PickleField& group : steps.optimizer().groups()) {
    const std::string group_type = optimizer_type(group, config);
    if (!state.type.empty() && state.type != group_type) group.fail("expected the weight decay of the other groups");
    state.type = group_type;
    state.groups.push_back(group_options(group));
  }
  return state;
}

int64_t integer_or(const PickleValue* value, int64_t fallback) {
  return value != nullptr && value->is(PickleKind::kInt) ? value->integer : fallback;
}

// Stages 1 to 3 keep an object of DeepSpeed's LossScaler, stage 0 its numbers.
std::optional<optimizers::LossScalerState> loss_scaler_of(const SavedCheckpoint& saved) {
  const auto number = [](const PickleValue* value, const PickleField& where) {
    if (value == nullptr) where.fail("no cur_scale");
    return PickleField(*value, where.where()).number();
  };
  optimizers::LossScalerState state;
  if (saved.stage > 0) {
    const PickleField scaler = saved.optim().at("loss_scaler");
    const PickleValue& value = scaler.value();
    state.scale = number(value.attribute("cur_scale"), scaler);
    state.iteration = integer_or(value.attribute("cur_iter"), state.iteration);
    state.last_overflow_iteration = integer_or(value.attribute("last_overflow_iter"), state.last_overflow_iteration);
    state.remaining_hysteresis = integer_or(value.attribute("cur_hysteresis"), state.remaining_hysteresis);
    return state;
  }
  const auto optimizer = saved.model().find("optimizer");
  if (!optimizer || !optimizer->find("cur_scale")) return std::nullopt;
  state.scale = optimizer->at("cur_scale").number();
  state.iteration = integer_or(optimizer->value().find("cur_iter"), state.iteration);
  state.last_overflow_iteration =
      integer_or(optimizer->value().find("last_overflow_iter"), state.last_overflow_iteration);
  return state;
}

// Returns the state of torch's ReduceLROnPlateau. Before the first value its best is infinite.
std::optional<optimizers::PlateauState> plateau_of(const PickleField& schedule) {
  if (!schedule.find("num_bad_epochs")) return std::nullopt;
  const auto count = [&](const char* key) {
    const auto value = schedule.find(key);
    return value ? value->integer() : 0;
  };
  optimizers::PlateauState state{
      .bad_values = count("num_bad_epochs"), .cooldown = count("cooldown_counter"), .values = count("last_epoch")};
  if (const auto best = schedule.find("best"); best && state.values > 0) state.best = best->number();
  return state;
}

// Returns the counters and settings of a checkpoint. micro_steps, which DeepSpeed does not write, follows from
// global_steps. `config` and `client_state` hold what is plain JSON; client_state has the keys that are none of
// DeepSpeed's own. Throws IoError for missing or wrong values and for an optimizer other than Adam and AdamW.
//
// `saved`: the first model-parallel rank, which has what all of them have alike.
TrainingState saved_state(const SavedCheckpoint& saved, const PickleField& module) {
  const PickleField model = saved.model();
  TrainingState state;
  state.config = config_of(model);
  state.client_state = plain_entries(model.value(), own_keys());
  state.global_steps = count_of(model, "global_steps");
  state.skipped_steps = count_of(model, "skipped_steps");
  state.world_size = static_cast<int>(saved.ranks);
  if (model.find("global_samples")) {
    state.global_samples = count_of(model, "global_samples");
  } else {  // before 0.4
    state.global_samples = counted(state.global_steps, integer_in(state.config, "train_batch_size"), model);
  }
  state.micro_steps = counted(state.global_steps, accumulation_steps(state.config, saved.ranks), model);
  state.zero_stage = saved.stage;
  state.precision = precision_of(model, module);
  if (saved.has_optimizer() && (saved.stage > 0 || saved.module())) {
    state.optimizer = optimizer_of(saved, state.config);
  } else if (saved.has_optimizer()) {
    log::warning(model.where(), ": the optimizer's states are not read: a pipeline without ZeRO has them without the ",
                 "names of parameters; DeepSpeed writes these with zero_optimization.stage 1");
  }
  if (state.precision == "float16") state.loss_scaler = loss_scaler_of(saved);
  if (const auto schedule = model.find("lr_scheduler"); schedule && schedule->is(PickleKind::kDict)) {
    if (const auto iteration = schedule->find("last_batch_iteration")) state.lr_iteration = iteration->integer();
    state.plateau = plateau_of(*schedule);
  }
  return state;
}

class DeepspeedSource : public Source {
 public:
  explicit DeepspeedSource(const std::string& folder) : folder_(folder) {
    const SavedFolder files = find_saved_files(folder);
    std::vector<SavedCheckpoint> saved;
    for (const SavedFiles& of_rank : files.model_ranks) {
      saved.push_back(open_saved_checkpoint(of_rank, static_cast<int64_t>(files.model_ranks.size())));
    }
    read_state(files, saved);
    layout_.emplace(files, saved);
    for (const SavedCheckpoint& one : saved) {
      for (const auto& archives : {one.models, one.optims}) {
        for (const std::shared_ptr<TorchArchive>& archive : archives) archive->forget();
      }
    }
  }

  const std::string& location() const override { return folder_; }
  const TrainingState& state() const override { return state_; }
  const std::map<std::string, TensorInfo>& tensors() const override { return layout_->tensors(); }
  const std::map<std::string, std::string>& aliases() const override { return layout_->aliases(); }

  void read(const std::string& path, int64_t offset, const at::Tensor& destination) override {
    const int64_t numel = info(path).numel();
    require<IoError>(offset >= 0 && destination.numel() <= numel - offset, folder_, ": tensor \"", path,
                     "\": elements from ", offset, " to ", offset + destination.numel(), " asked for, it has ", numel);
    layout_->read(path, offset, destination);
  }

 private:
  // A pipeline's layers have files of their own, the module of other models is in those of its ranks.
  void read_state(const SavedFolder& files, const std::vector<SavedCheckpoint>& saved) {
    const bool pipeline = !files.layers.empty();
    for (const SavedCheckpoint& one : saved) {
      const PickleField model = one.model();
      if (pipeline && one.module()) {
        throw IoError(cat(files.layers.begin()->second[0], ": of a pipeline, beside ", model.where(),
                          ", which has a whole module; the folder holds more than one checkpoint"));
      }
      if (!pipeline && !one.module()) {
        model.fail("has no module, and the folder no layer_LL-model_states.pt of a pipeline's layers");
      }
      for (const char* key : {"global_steps", "skipped_steps", "dp_world_size"}) {
        if (count_of(model, key) != count_of(saved[0].model(), key)) {
          model.at(key).fail(cat("expected ", count_of(saved[0].model(), key), ", that of ", saved[0].model().where(),
                                 ", found ", count_of(model, key), "; a file is left from another save"));
        }
      }
      if (one.stage != saved[0].stage) model.fail("of another ZeRO stage than the other model-parallel ranks");
    }
    const auto layer = pipeline ? std::make_unique<TorchArchive>(files.layers.begin()->second[0]) : nullptr;
    state_ = saved_state(saved[0], layer ? PickleField(layer->root(), layer->path()) : *saved[0].module());
    const auto model_ranks = static_cast<int>(saved.size());
    for (const SavedCheckpoint& one : saved) {
      if (!state_.optimizer || one.stage == 0) break;
      const int64_t steps = SavedSteps(one).count();
      if (steps != state_.optimizer->step_count) {
        one.model().fail(cat("its optimizer has ", steps, " updates, that of the first model-parallel rank ",
                             state_.optimizer->step_count));
      }
    }
    state_.tensor_ranks = pipeline ? files.layer_ranks() : model_ranks;
    state_.pipeline_stages = model_ranks / state_.tensor_ranks;
    state_.world_size *= model_ranks;
  }

  std::string folder_;
  TrainingState state_;
  std::optional<JoinedLayout> layout_;
};

}  // namespace

std::unique_ptr<Source> open_deepspeed(const std::string& folder) { return std::make_unique<DeepspeedSource>(folder); }

}  // namespace ds::checkpoint
