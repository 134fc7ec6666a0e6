#include "checkpoint/source/training_state.h"

#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/json/json_integer.h"

namespace ds::checkpoint {
namespace {

using nlohmann::json;

json group_to_json(const optimizers::GroupOptions& group) {
  return {{"lr", group.lr},       {"weight_decay", group.weight_decay}, {"beta1", group.beta1},
          {"beta2", group.beta2}, {"momentum", group.momentum},         {"eps", group.eps}};
}

optimizers::GroupOptions group_from(const json& group) {
  return {.lr = group.at("lr").get<double>(),
          .weight_decay = group.at("weight_decay").get<double>(),
          .beta1 = group.at("beta1").get<double>(),
          .beta2 = group.at("beta2").get<double>(),
          .momentum = group.at("momentum").get<double>(),
          .eps = group.at("eps").get<double>()};
}

// JSON has no infinity, which may be the best of what a program measured.
json number_to_json(double value) { return std::isinf(value) ? json(value > 0 ? "inf" : "-inf") : json(value); }

double number_from(const json& value) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "inf") return kInfinity;
  return value == "-inf" ? -kInfinity : value.get<double>();
}

OptimizerState optimizer_from(const json& value) {
  OptimizerState optimizer{.type = value.at("type").get<std::string>(),
                           .step_count = json_integer<int64_t>(value.at("step_count")),
                           .groups = {}};
  for (const json& group : value.at("groups")) optimizer.groups.push_back(group_from(group));
  return optimizer;
}

json curriculum_to_json(const efficiency::CurriculumPosition& position) {
  json clusters = json::array();
  for (const auto& cluster : position.clusters) {
    clusters.push_back({{"difficulties", cluster.difficulties}, {"drawn", cluster.drawn}});
  }
  return {{"batches", position.batches},
          {"batch_size", position.batch_size},
          {"taken", position.taken},
          {"files", position.files},
          {"clusters", clusters}};
}

efficiency::CurriculumPosition curriculum_from(const json& value) {
  efficiency::CurriculumPosition position{.batches = json_integer<int64_t>(value.at("batches")),
                                          .batch_size = json_integer<int64_t>(value.at("batch_size")),
                                          .taken = json_integer<int64_t>(value.at("taken")),
                                          .files = json_integer<uint64_t>(value.at("files")),
                                          .clusters = {}};
  for (const json& cluster : value.at("clusters")) {
    auto& to = position.clusters.emplace_back();
    to.drawn = json_integer<int64_t>(cluster.at("drawn"));
    to.difficulties = json_integers<int64_t>(cluster.at("difficulties"));
  }
  return position;
}

}  // namespace

json to_json(const TrainingState& state) {
  json result = {{"global_steps", state.global_steps}, {"global_samples", state.global_samples},
                 {"micro_steps", state.micro_steps},   {"skipped_steps", state.skipped_steps},
                 {"world_size", state.world_size},     {"zero_stage", state.zero_stage},
                 {"precision", state.precision},       {"config", state.config},
                 {"client_state", state.client_state}};
  if (state.pipeline_stages > 1) result["pipeline_stages"] = state.pipeline_stages;
  if (state.tensor_ranks > 1) result["tensor_ranks"] = state.tensor_ranks;
  if (!state.run.empty()) result["run"] = state.run;
  if (!state.keep_last_tag.empty()) result["keep_last_tag"] = state.keep_last_tag;
  if (state.empty_modules) result["empty_modules"] = *state.empty_modules;
  if (state.optimizer) {
    json groups = json::array();
    for (const optimizers::GroupOptions& group : state.optimizer->groups) groups.push_back(group_to_json(group));
    result["optimizer"] = {
        {"type", state.optimizer->type}, {"step_count", state.optimizer->step_count}, {"groups", groups}};
  }
  if (state.loss_scaler) {
    result["loss_scaler"] = {{"scale", state.loss_scaler->scale},
                             {"iteration", state.loss_scaler->iteration},
                             {"last_overflow_iteration", state.loss_scaler->last_overflow_iteration},
                             {"remaining_hysteresis", state.loss_scaler->remaining_hysteresis}};
  }
  if (state.ema_updates) result["ema_updates"] = *state.ema_updates;
  if (state.lr_iteration) result["lr_iteration"] = *state.lr_iteration;
  if (state.plateau) {
    const optimizers::PlateauState& plateau = *state.plateau;
    result["plateau"] = {
        {"bad_values", plateau.bad_values}, {"cooldown", plateau.cooldown}, {"values", plateau.values}};
    if (plateau.best) result["plateau"]["best"] = number_to_json(*plateau.best);
  }
  if (state.data) {
    result["data"] = {
        {"epoch", state.data->epoch}, {"next_sample", state.data->next_sample}, {"seed", state.data->seed}};
    if (state.data->curriculum) result["data"]["curriculum"] = curriculum_to_json(*state.data->curriculum);
  }
  return result;
}

TrainingState training_state_from(const json& value, const std::string& where) {
  TrainingState state;
  try {
    state.global_steps = json_integer<int64_t>(value.at("global_steps"));
    state.global_samples = json_integer<int64_t>(value.at("global_samples"));
    state.micro_steps = json_integer<int64_t>(value.at("micro_steps"));
    state.skipped_steps = json_integer<int64_t>(value.at("skipped_steps"));
    state.world_size = json_integer<int>(value.at("world_size"));
    state.pipeline_stages = json_integer<int>(value.value("pipeline_stages", json(1)));
    state.tensor_ranks = json_integer<int>(value.value("tensor_ranks", json(1)));
    state.zero_stage = json_integer<int64_t>(value.at("zero_stage"));
    state.precision = value.at("precision").get<std::string>();
    state.run = value.value("run", std::string());
    state.keep_last_tag = value.value("keep_last_tag", std::string());
    if (value.contains("empty_modules")) {
      state.empty_modules = value["empty_modules"].get<std::vector<std::string>>();
    }
    state.config = value.at("config");
    state.client_state = value.at("client_state");
    if (value.contains("optimizer")) state.optimizer = optimizer_from(value["optimizer"]);
    if (value.contains("loss_scaler")) {
      const json& scaler = value["loss_scaler"];
      state.loss_scaler = optimizers::LossScalerState{
          .scale = scaler.at("scale").get<double>(),
          .iteration = json_integer<int64_t>(scaler.at("iteration")),
          .last_overflow_iteration = json_integer<int64_t>(scaler.at("last_overflow_iteration")),
          .remaining_hysteresis = json_integer<int64_t>(scaler.at("remaining_hysteresis"))};
    }
    if (value.contains("ema_updates")) state.ema_updates = json_integer<int64_t>(value["ema_updates"]);
    if (value.contains("lr_iteration")) state.lr_iteration = json_integer<int64_t>(value["lr_iteration"]);
    if (value.contains("plateau")) {
      const json& plateau = value["plateau"];
      state.plateau = optimizers::PlateauState{.bad_values = json_integer<int64_t>(plateau.at("bad_values")),
                                               .cooldown = json_integer<int64_t>(plateau.at("cooldown")),
                                               .values = json_integer<int64_t>(plateau.at("values"))};
      if (plateau.contains("best")) state.plateau->best = number_from(plateau["best"]);
    }
    if (value.contains("data")) {
      const json& data = value["data"];
      state.data = DataPosition{.epoch = json_integer<int64_t>(data.at("epoch")),
                                .next_sample = json_integer<int64_t>(data.at("next_sample")),
                                .seed = json_integer<uint64_t>(data.at("seed"))};
      if (data.contains("curriculum")) state.data->curriculum = curriculum_from(data["curriculum"]);
    }
  } catch (const json::exception& error) {
    throw IoError(cat(where, ": training state: ", error.what()));
  }
  return state;
}

}  // namespace ds::checkpoint
