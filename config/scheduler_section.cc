#include "dsengine/config_training.h"

#include <algorithm>

#include "config/describe.h"
#include "core/check.h"
#include "core/json/near_miss.h"

namespace ds::engine::config {

// A number for all parameter groups, or a list with one for each.
struct NumberOrList {
  std::vector<double> values;
};

bool convert(const nlohmann::ordered_json& json, NumberOrList& out) {
  double number = 0;
  if (ds::convert(json, number)) {
    out.values = {number};
    return true;
  }
  return ds::convert(json, out.values) && !out.values.empty();
}

std::string wanted(const NumberOrList&) { return "a number, or a list with one for each parameter group"; }

nlohmann::ordered_json to_ordered_json(const NumberOrList& value) {
  if (value.values.size() == 1) return value.values[0];
  return value.values;
}

namespace {

using optimizers::PerGroup;

void per_group(JsonFields& json, const char* key, PerGroup& out) {
  NumberOrList value{out};
  json.field(key, value);
  out = value.values;
}

void per_group(JsonFields& json, const char* key, std::optional<PerGroup>& out) {
  std::optional<NumberOrList> value;
  if (out) value = NumberOrList{*out};
  json.field(key, value);
  out = value ? std::optional(value->values) : std::nullopt;
}

// Warns of an unknown curve. DeepSpeed takes the curve that is the default, and says so.
void warmup_type(JsonFields& json, optimizers::WarmupType& out) {
  const nlohmann::ordered_json* value = json.keys().peek("warmup_type");
  if (value != nullptr && value->is_string() && *value != "log" && *value != "linear") {
    json.keys().declare("warmup_type");
    json.warning("warmup_type", cat("expected \"log\" or \"linear\", found ", shown(*value),
                                    "; taken as \"log\", as DeepSpeed takes it"));
    out = optimizers::WarmupType::kLog;
    return;
  }
  json.enumerator("warmup_type", out,
                  {{"log", optimizers::WarmupType::kLog}, {"linear", optimizers::WarmupType::kLinear}});
}

// A file that says 0 is refused, as DeepSpeed's schedules refuse it. In place of "auto" it is a trainer's word for no
// warm-up, and runs: as 1, which is as short, so that the resolved config can be read again.
void warmup_steps(JsonFields& json, int64_t& out) {
  constexpr const char* kKey = "warmup_num_steps";
  const nlohmann::ordered_json* value = json.keys().peek(kKey);
  int64_t written = 1;
  if (value != nullptr && ds::convert(*value, written) && written == 0) {
    json.keys().declare(kKey);
    return json.error(kKey,
                      cat("expected an integer > 0, found ", shown(*value), ", which DeepSpeed refuses too; 1 is ",
                          "the shortest warm-up, of 2 steps. For none remove the scheduler, or use ConstantLR ",
                          "with \"factor\": 1"));
  }
  json.field(kKey, out, value != nullptr ? above(0) : at_least(0));
  if (json.reading()) out = std::max<int64_t>(out, 1);
}

void parameters(JsonFields& json, optimizers::WarmupLrOptions& s) {
  per_group(json, "warmup_min_lr", s.warmup_min_lr);
  per_group(json, "warmup_max_lr", s.warmup_max_lr);
  warmup_steps(json, s.warmup_num_steps);
  warmup_type(json, s.warmup_type);
}

void parameters(JsonFields& json, optimizers::WarmupDecayLrOptions& s) {
  json.field("total_num_steps", s.total_num_steps, above(0));
  per_group(json, "warmup_min_lr", s.warmup_min_lr);
  per_group(json, "warmup_max_lr", s.warmup_max_lr);
  warmup_steps(json, s.warmup_num_steps);
  warmup_type(json, s.warmup_type);
}

void parameters(JsonFields& json, optimizers::WarmupCosineLrOptions& s) {
  json.field("total_num_steps", s.total_num_steps, above(0));
  json.field("warmup_min_ratio", s.warmup_min_ratio);
  warmup_steps(json, s.warmup_num_steps);
  json.field("cos_min_ratio", s.cos_min_ratio);
  warmup_type(json, s.warmup_type);
}

void parameters(JsonFields& json, optimizers::LrRangeTestOptions& s) {
  per_group(json, "lr_range_test_min_lr", s.lr_range_test_min_lr);
  json.field("lr_range_test_step_size", s.lr_range_test_step_size, above(0));
  json.field("lr_range_test_step_rate", s.lr_range_test_step_rate);
  json.field("lr_range_test_staircase", s.lr_range_test_staircase);
}

void parameters(JsonFields& json, optimizers::OneCycleOptions& s) {
  per_group(json, "cycle_min_lr", s.cycle_min_lr);
  per_group(json, "cycle_max_lr", s.cycle_max_lr);
  json.field("decay_lr_rate", s.decay_lr_rate);
  json.field("cycle_first_step_size", s.cycle_first_step_size, above(0));
  json.field("cycle_second_step_size", s.cycle_second_step_size, at_least(0));
  json.field("cycle_first_stair_count", s.cycle_first_stair_count, at_least(0));
  json.field("cycle_second_stair_count", s.cycle_second_stair_count, at_least(0));
  json.field("decay_step_size", s.decay_step_size, at_least(0));
  json.field("cycle_momentum", s.cycle_momentum);
  per_group(json, "cycle_min_mom", s.cycle_min_mom);
  per_group(json, "cycle_max_mom", s.cycle_max_mom);
  json.field("decay_mom_rate", s.decay_mom_rate);
}

void parameters(JsonFields& json, optimizers::StepLrOptions& s) {
  json.field("step_size", s.step_size, above(0));
  json.field("gamma", s.gamma);
}

void parameters(JsonFields& json, optimizers::MultiStepLrOptions& s) {
  json.field("milestones", s.milestones);
  json.field("gamma", s.gamma);
}

void parameters(JsonFields& json, optimizers::ConstantLrOptions& s) {
  json.field("factor", s.factor, between(0, 1));
  json.field("total_iters", s.total_iters, at_least(0));
}

void parameters(JsonFields& json, optimizers::LinearLrOptions& s) {
  json.field("start_factor", s.start_factor, between(0, 1));
  json.field("end_factor", s.end_factor, between(0, 1));
  json.field("total_iters", s.total_iters, above(0));
}

void parameters(JsonFields& json, optimizers::ExponentialLrOptions& s) { json.field("gamma", s.gamma); }

void parameters(JsonFields& json, optimizers::PolynomialLrOptions& s) {
  json.field("total_iters", s.total_iters, above(0));
  json.field("power", s.power);
}

void parameters(JsonFields& json, optimizers::CosineAnnealingLrOptions& s) {
  json.field("T_max", s.t_max, above(0));
  json.field("eta_min", s.eta_min);
}

void parameters(JsonFields& json, optimizers::CosineAnnealingWarmRestartsOptions& s) {
  json.field("T_0", s.t_0, above(0));
  json.field("T_mult", s.t_mult, above(0));
  json.field("eta_min", s.eta_min);
}

void parameters(JsonFields& json, optimizers::CyclicLrOptions& s) {
  per_group(json, "base_lr", s.base_lr);
  per_group(json, "max_lr", s.max_lr);
  json.field("step_size_up", s.step_size_up, above(0));
  json.field("step_size_down", s.step_size_down, above(0));
  json.enumerator("mode", s.mode,
                  {{"triangular", optimizers::CyclicMode::kTriangular},
                   {"triangular2", optimizers::CyclicMode::kTriangular2},
                   {"exp_range", optimizers::CyclicMode::kExpRange}});
  json.field("gamma", s.gamma);
  json.field("cycle_momentum", s.cycle_momentum);
  per_group(json, "base_momentum", s.base_momentum);
  per_group(json, "max_momentum", s.max_momentum);
}

void parameters(JsonFields& json, optimizers::OneCycleLrOptions& s) {
  per_group(json, "max_lr", s.max_lr);
  json.field("total_steps", s.total_steps, above(0));
  json.field("epochs", s.epochs, above(0));
  json.field("steps_per_epoch", s.steps_per_epoch, above(0));
  json.field("pct_start", s.pct_start, between(0, 1));
  json.enumerator("anneal_strategy", s.cosine, {{"cos", true}, {"linear", false}});
  json.field("cycle_momentum", s.cycle_momentum);
  per_group(json, "base_momentum", s.base_momentum);
  per_group(json, "max_momentum", s.max_momentum);
  json.field("div_factor", s.div_factor, above(0));
  json.field("final_div_factor", s.final_div_factor, above(0));
  json.field("three_phase", s.three_phase);
}

void parameters(JsonFields& json, optimizers::ReduceLrOnPlateauOptions& s) {
  json.enumerator("mode", s.largest, {{"min", false}, {"max", true}});
  json.field("factor", s.factor, between(0, 1));
  if (json.reading() && s.factor >= 1) json.error("factor", cat("expected a number below 1, found ", s.factor));
  json.field("patience", s.patience, at_least(0));
  json.field("threshold", s.threshold);
  json.enumerator("threshold_mode", s.relative, {{"rel", true}, {"abs", false}});
  json.field("cooldown", s.cooldown, at_least(0));
  per_group(json, "min_lr", s.min_lr);
  json.field("eps", s.eps, at_least(0));
}

struct ScheduleType {
  const char* name;
  optimizers::LrScheduleOptions options;  // the defaults
  std::vector<const char*> required;
};

const std::vector<ScheduleType>& schedule_types() {
  static const std::vector<ScheduleType> kTypes = {
      {"WarmupLR", optimizers::WarmupLrOptions{}, {}},
      {"WarmupDecayLR", optimizers::WarmupDecayLrOptions{}, {"total_num_steps"}},
      {"WarmupCosineLR", optimizers::WarmupCosineLrOptions{}, {"total_num_steps"}},
      {"LRRangeTest", optimizers::LrRangeTestOptions{}, {}},
      {"OneCycle", optimizers::OneCycleOptions{}, {"cycle_min_lr", "cycle_max_lr"}},
      {"StepLR", optimizers::StepLrOptions{}, {"step_size"}},
      {"MultiStepLR", optimizers::MultiStepLrOptions{}, {"milestones"}},
      {"ConstantLR", optimizers::ConstantLrOptions{}, {}},
      {"LinearLR", optimizers::LinearLrOptions{}, {}},
      {"ExponentialLR", optimizers::ExponentialLrOptions{}, {"gamma"}},
      {"PolynomialLR", optimizers::PolynomialLrOptions{}, {}},
      {"CosineAnnealingLR", optimizers::CosineAnnealingLrOptions{}, {"T_max"}},
      {"CosineAnnealingWarmRestarts", optimizers::CosineAnnealingWarmRestartsOptions{}, {"T_0"}},
      {"CyclicLR", optimizers::CyclicLrOptions{}, {"base_lr", "max_lr"}},
      {"OneCycleLR", optimizers::OneCycleLrOptions{}, {"max_lr"}},
      {"ReduceLROnPlateau", optimizers::ReduceLrOnPlateauOptions{}, {}}};
  return kTypes;
}

const ScheduleType* find_type(const std::string& name) {
  for (const ScheduleType& type : schedule_types()) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

// The other classes of torch.optim.lr_scheduler, which DeepSpeed builds by name: they take Python functions.
const std::vector<std::string>& torch_types() {
  static const std::vector<std::string> kTypes = {"LambdaLR", "MultiplicativeLR"};
  return kTypes;
}

void describe_params(JsonFields& json, SchedulerSection& s) {
  std::visit([&json](auto& options) { parameters(json, options); }, *s.options);
  json.field("last_batch_iteration", s.last_batch_iteration, at_least(-1));
}

void choose_type(JsonFields& json, SchedulerSection& s, const std::string& type) {
  if (const ScheduleType* known = find_type(type)) {
    s.type = type;
    s.options = known->options;
  } else if (std::find(torch_types().begin(), torch_types().end(), type) != torch_types().end()) {
    s.type = type;
  } else {
    const auto meant = near_miss(type, scheduler_types());
    json.error("type", cat("unknown scheduler \"", type, "\"; ",
                           meant ? cat("did you mean ", *meant, "?")
                                 : "expected WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle or one of "
                                   "torch's, as CosineAnnealingLR"));
  }
}

// Parameters that have no default: whether the file or the program gives them. `written`: the file's object; `values`:
// every parameter as resolved.
void check_required(JsonFields& json, const std::string& type, const nlohmann::ordered_json& written,
                    const nlohmann::ordered_json& values) {
  for (const char* key : find_type(type)->required) {
    const bool absent = !written.contains(key);
    const bool unresolved = !absent && written[key] == "auto" && (values[key] == 0 || values[key].empty());
    if (!absent && !unresolved) continue;
    json.error("params",
               cat(type, " needs \"", key, "\", ",
                   unresolved ? cat("which is \"auto\" and which the program does not give; write a number, or set "
                                    "AutoValues")
                              : cat("which is missing; add it")));
  }
}

}  // namespace

std::vector<std::string> scheduler_types() {
  std::vector<std::string> names;
  for (const ScheduleType& type : schedule_types()) names.emplace_back(type.name);
  return names;
}

std::vector<std::string> scheduler_parameters(const std::string& type) {
  SchedulerSection section;
  section.options = find_type(type)->options;
  const nlohmann::ordered_json values = write_fields(section, describe_params);
  std::vector<std::string> names;
  for (const auto& entry : values.items()) names.push_back(entry.key());
  return names;
}

void describe(JsonFields& json, SchedulerSection& s) {
  std::optional<std::string> type = s.given() ? std::optional(s.type) : std::nullopt;
  json.field("type", type);
  if (json.reading() && type) choose_type(json, s, *type);
  if (!s.options) return json.field("params", s.params);
  json.section("params", s, describe_params, UnknownKeys::kRefuseAndList);
  if (!json.reading()) return;
  static const nlohmann::ordered_json kNothing = nlohmann::ordered_json::object();
  const nlohmann::ordered_json* written = json.find("params");
  s.params = written != nullptr && written->is_object() ? *written : kNothing;
  const nlohmann::ordered_json values = write_fields(s, describe_params);
  check_required(json, s.type, s.params, values);
  for (auto& [key, value] : s.params.items()) {
    if (value == "auto" && values.contains(key)) value = values[key];
  }
}

}  // namespace ds::engine::config
