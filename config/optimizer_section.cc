#include "core/ascii.h"
#include "dsengine/config_training.h"

#include <array>

#include "config/describe.h"
#include "core/check.h"
#include "core/json/near_miss.h"
#include "optim/optimizer_table.h"

namespace ds::engine::config {
namespace {

using optimizers::find_optimizer;
using optimizers::OptimizerDescription;

// Names that DeepSpeed knows and this build refuses.
constexpr std::array<const char*, 7> kRefusedTypes = {"MuAdam", "MuAdamW", "MuSGD",    "ASGD",
                                                      "LBFGS",  "Rprop",   "Adafactor"};

void describe_params(JsonFields& json, OptimizerSection& s) {
  const OptimizerDescription& row = *find_optimizer(s.type);
  json.field("lr", s.values.lr, at_least(0));
  json.field("weight_decay", s.values.weight_decay, at_least(0));
  row.describe_keys(json, s.values);
  if (json.keys().has("max_grad_norm") && !row.compresses) {
    json.error("max_grad_norm", "not a parameter of an optimizer; use the top-level key \"gradient_clipping\"");
    json.keys().declare("max_grad_norm");
  }
}

std::string canonical_type(JsonFields& json, const std::string& type) {
  if (const OptimizerDescription* const row = find_optimizer(type)) return row->name;
  for (const char* const refused : kRefusedTypes) {
    if (equal_in_any_case(refused, type)) return refused;
  }
  const auto meant = near_miss(type, optimizer_types());
  json.error("type", meant ? cat("unknown optimizer \"", type, "\"; did you mean ", *meant, "?")
                           : cat("unknown optimizer \"", type, "\"; expected one of ",
                                 optimizers::optimizer_names([](const OptimizerDescription&) { return true; })));
  return "";
}

}  // namespace

bool OptimizerSection::decoupled_weight_decay() const { return type == "AdamW" || values.adam_w_mode; }

bool OptimizerSection::compresses() const {
  const OptimizerDescription* const row = find_optimizer(type);
  return row != nullptr && row->compresses;
}

std::string OptimizerSection::algorithm() const { return type == "Adam" && decoupled_weight_decay() ? "AdamW" : type; }

const std::vector<std::string>& optimizer_types() {
  static const std::vector<std::string> kTypes = [] {
    std::vector<std::string> types;
    for (const OptimizerDescription& row : optimizers::optimizer_table()) types.push_back(row.name);
    types.insert(types.end(), kRefusedTypes.begin(), kRefusedTypes.end());
    return types;
  }();
  return kTypes;
}

std::vector<std::string> optimizer_parameters(const std::string& type) {
  const OptimizerDescription* const row = find_optimizer(type);
  if (row == nullptr) return {};
  nlohmann::ordered_json out;
  JsonFields json(out);
  OptimizerParams values = row->defaults;
  json.field("lr", values.lr);
  json.field("weight_decay", values.weight_decay);
  row->describe_keys(json, values);
  std::vector<std::string> names;
  for (const auto& entry : out.items()) names.push_back(entry.key());
  return names;
}

void describe(JsonFields& json, OptimizerSection& s) {
  std::optional<std::string> type = s.given() ? std::optional(s.type) : std::nullopt;
  json.field("type", type);
  if (json.reading() && type) s.type = canonical_type(json, *type);
  const OptimizerDescription* const row = find_optimizer(s.type);
  if (json.reading() && type) s.values = row != nullptr ? row->defaults : OptimizerParams{};
  if (row != nullptr) {
    json.section("params", s, describe_params, UnknownKeys::kRefuseAndList);
  } else {
    json.field("params", s.params);
  }
  json.field("legacy_fusion", s.legacy_fusion);
  if (!json.reading() || row == nullptr) return;
  const nlohmann::ordered_json* written = json.find("params");
  if (written == nullptr || !written->is_object()) return;
  const nlohmann::ordered_json values = write_fields(s, describe_params);
  s.params = *written;
  for (auto& [key, value] : s.params.items()) {
    if (value == "auto" && values.contains(key)) value = values[key];
  }
}

}  // namespace ds::engine::config
