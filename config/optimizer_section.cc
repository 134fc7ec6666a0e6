#include "dsengine/config_training.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "config/describe.h"
#include "core/check.h"
#include "core/json/near_miss.h"

namespace ds::engine::config {
namespace {

constexpr JsonRange kBelowOne = {.minimum = 0, .maximum = 1, .open_maximum = true};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

void betas(JsonFields& json, OptimizerParams& p) {
  json.field("betas", p.betas);
  for (const double beta : p.betas) {
    if (json.reading() && !kBelowOne.accepts(beta)) {
      json.error("betas", cat("expected numbers >= 0 and < 1, found ", beta));
    }
  }
}

// Choices of implementation that change no result: accepted, without effect.
void implementation_hints(JsonFields& json) {
  for (const char* hint : {"foreach", "fused", "capturable", "set_grad_none"}) json.ignore(hint);
}

// What Python takes as true: programs for other accelerators name an implementation here ("torch_impl").
void torch_adam(JsonFields& json, OptimizerParams& p) {
  const nlohmann::ordered_json* value = json.peek("torch_adam");
  bool word = false;
  if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().empty() ||
      ds::convert(*value, word)) {
    return json.field("torch_adam", p.torch_adam);
  }
  json.ignore("torch_adam");
  json.warning("torch_adam",
               cat("expected true or false, found ", shown(*value), "; taken as true, as Python takes it"));
  p.torch_adam = true;
}

void adam_parameters(JsonFields& json, OptimizerParams& p) {
  betas(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("bias_correction", p.bias_correction);
  json.field("amsgrad", p.amsgrad);
  torch_adam(json, p);
  json.field("adam_w_mode", p.adam_w_mode);
  json.field("fp32_optimizer_states", p.fp32_optimizer_states);
  implementation_hints(json);
}

void lamb_parameters(JsonFields& json, OptimizerParams& p) {
  betas(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("bias_correction", p.bias_correction);
  json.field("eps_inside_sqrt", p.eps_inside_sqrt);
  json.field("max_coeff", p.max_coeff, above(0));
  json.field("min_coeff", p.min_coeff, at_least(0));
  json.field("amsgrad", p.amsgrad);
  if (json.reading() && p.amsgrad) json.error("amsgrad", "expected false: there is no AMSGrad form of this optimizer");
}

void muon_parameters(JsonFields& json, OptimizerParams& p) {
  json.field("muon_lr", p.muon_lr, at_least(0));
  json.field("adam_lr", p.adam_lr, at_least(0));
  json.field("momentum", p.momentum, kBelowOne);
  json.choice("ns_method", p.ns_method, {"gram", "standard"});
  json.field("per_head_muon", p.per_head_muon);
  json.field("head_dim", p.head_dim, at_least(0));
  if (json.reading() && p.per_head_muon && p.head_dim == 0) {
    json.error("per_head_muon",
               "true needs head_dim beside it, the rows of one head: modules have no model config that "
               "says it");
  }
  betas(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("adam_w_mode", p.adam_w_mode);
  torch_adam(json, p);
  json.field("fp32_optimizer_states", p.fp32_optimizer_states);
  implementation_hints(json);
}

void sgd_parameters(JsonFields& json, OptimizerParams& p) {
  json.field("momentum", p.momentum, at_least(0));
  json.field("dampening", p.dampening);
  json.field("nesterov", p.nesterov);
  implementation_hints(json);
  if (json.reading() && p.nesterov && (p.momentum <= 0 || p.dampening != 0)) {
    json.error("nesterov", cat("expected momentum > 0 and dampening 0 with nesterov, found momentum ", p.momentum,
                               " and dampening ", p.dampening));
  }
}

void adagrad_parameters(JsonFields& json, OptimizerParams& p) {
  json.field("eps", p.eps, at_least(0));
  json.field("lr_decay", p.lr_decay, at_least(0));
  json.field("initial_accumulator_value", p.initial_accumulator_value, at_least(0));
  json.ignore("amsgrad");
  implementation_hints(json);
}

void lion_parameters(JsonFields& json, OptimizerParams& p) {
  betas(json, p);
  implementation_hints(json);
}

void rmsprop_parameters(JsonFields& json, OptimizerParams& p) {
  json.field("alpha", p.alpha, at_least(0));
  json.field("eps", p.eps, at_least(0));
  json.field("momentum", p.momentum, at_least(0));
  json.field("centered", p.centered);
  implementation_hints(json);
}

void adamax_parameters(JsonFields& json, OptimizerParams& p) {
  betas(json, p);
  json.field("eps", p.eps, at_least(0));
  implementation_hints(json);
}

void radam_parameters(JsonFields& json, OptimizerParams& p) {
  adamax_parameters(json, p);
  json.field("decoupled_weight_decay", p.decoupled_weight_decay);
}

void nadam_parameters(JsonFields& json, OptimizerParams& p) {
  radam_parameters(json, p);
  json.field("momentum_decay", p.momentum_decay, at_least(0));
}

void adadelta_parameters(JsonFields& json, OptimizerParams& p) {
  json.field("rho", p.rho, {.minimum = 0, .maximum = 1});
  json.field("eps", p.eps, at_least(0));
  implementation_hints(json);
}

void one_bit_parameters(JsonFields& json, OptimizerParams& p) {
  lamb_parameters(json, p);
  json.field("cuda_aware", p.cuda_aware);
  json.choice("comm_backend_name", p.comm_backend_name, {"nccl", "mpi", "hccl", "compressed", "gloo"});
  json.field("deepspeed_semantics", p.deepspeed_semantics);
  json.ignore("max_grad_norm");
}

// After the freeze these divide by sqrt(v) + eps alone.
void eps_outside_sqrt(JsonFields& json, const OptimizerParams& p) {
  if (json.reading() && p.eps_inside_sqrt) {
    json.error("eps_inside_sqrt", "expected false: only Lamb and OneBitLamb have this form");
  }
}

void one_bit_adam_parameters(JsonFields& json, OptimizerParams& p) {
  one_bit_parameters(json, p);
  eps_outside_sqrt(json, p);
  json.field("freeze_step", p.freeze_step, at_least(0));
}

void one_bit_lamb_parameters(JsonFields& json, OptimizerParams& p) {
  one_bit_parameters(json, p);
  json.field("freeze_step", p.freeze_step, at_least(0));
  json.field("coeff_beta", p.coeff_beta, kBelowOne);
  json.field("factor_max", p.factor_max, above(0));
  json.field("factor_min", p.factor_min, at_least(0));
  json.field("factor_threshold", p.factor_threshold, at_least(0));
}

void zero_one_adam_parameters(JsonFields& json, OptimizerParams& p) {
  one_bit_parameters(json, p);
  eps_outside_sqrt(json, p);
  json.field("var_freeze_step", p.var_freeze_step, at_least(0));
  json.field("var_update_scaler", p.var_update_scaler, above(0));
  json.field("local_step_scaler", p.local_step_scaler, above(0));
  json.field("local_step_clipper", p.local_step_clipper, above(0));
}

using DescribeParameters = void (*)(JsonFields&, OptimizerParams&);

// Types whose parameters are known here.
const std::map<std::string, DescribeParameters>& described_types() {
  static const std::map<std::string, DescribeParameters> kTypes = {{"Adam", adam_parameters},
                                                                   {"AdamW", adam_parameters},
                                                                   {"Lamb", lamb_parameters},
                                                                   {"Adagrad", adagrad_parameters},
                                                                   {"Lion", lion_parameters},
                                                                   {"Muon", muon_parameters},
                                                                   {"SGD", sgd_parameters},
                                                                   {"RMSprop", rmsprop_parameters},
                                                                   {"Adamax", adamax_parameters},
                                                                   {"NAdam", nadam_parameters},
                                                                   {"RAdam", radam_parameters},
                                                                   {"Adadelta", adadelta_parameters},
                                                                   {"OneBitAdam", one_bit_adam_parameters},
                                                                   {"OneBitLamb", one_bit_lamb_parameters},
                                                                   {"ZeroOneAdam", zero_one_adam_parameters}};
  return kTypes;
}

// Defaults that differ from those of the struct.
OptimizerParams defaults_of(const std::string& type) {
  OptimizerParams p;
  if (type == "Adagrad") {
    p.lr = 1e-2;
    p.eps = 1e-10;
  } else if (type == "Muon") {
    p.lr = 0.02;
    p.momentum = 0.95;
    p.betas = {0.9, 0.95};
    p.eps = 1e-10;
  } else if (type == "RMSprop") {
    p.lr = 1e-2;
  } else if (type == "Adamax" || type == "NAdam") {
    p.lr = 2e-3;
  } else if (type == "Adadelta") {
    p.lr = 1.0;
    p.eps = 1e-6;
  }
  return p;
}

void describe_params(JsonFields& json, OptimizerSection& s) {
  const auto found = described_types().find(s.type);
  json.field("lr", s.values.lr, at_least(0));
  json.field("weight_decay", s.values.weight_decay, at_least(0));
  found->second(json, s.values);
  json.list_known_keys();
  if (json.has("max_grad_norm") && !s.type.starts_with("OneBit") && !s.type.starts_with("ZeroOne")) {
    json.error("max_grad_norm", "not a parameter of an optimizer; use the top-level key \"gradient_clipping\"");
    json.ignore("max_grad_norm");
  }
}

std::string canonical(JsonFields& json, const std::string& type) {
  for (const std::string& known : optimizer_types()) {
    if (lower(known) == lower(type)) return known;
  }
  const auto meant = near_miss(type, optimizer_types());
  std::string known;
  for (const auto& entry : described_types()) known += cat(known.empty() ? "" : ", ", entry.first);
  json.error("type", meant ? cat("unknown optimizer \"", type, "\"; did you mean ", *meant, "?")
                           : cat("unknown optimizer \"", type, "\"; expected one of ", known));
  return "";
}

}  // namespace

const std::vector<std::string>& optimizer_types() {
  static const std::vector<std::string> kTypes = {
      "Adam",    "AdamW",    "Lamb",       "Adagrad",    "Lion",        "Muon",       "SGD",      "MuAdam",
      "MuAdamW", "MuSGD",    "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "RMSprop",    "NAdam",    "RAdam",
      "Adamax",  "Adadelta", "ASGD",       "LBFGS",      "Rprop",       "SparseAdam", "Adafactor"};
  return kTypes;
}

std::vector<std::string> optimizer_parameters(const std::string& type) {
  const auto found = described_types().find(type);
  if (found == described_types().end()) return {};
  nlohmann::ordered_json out;
  JsonFields json(out);
  OptimizerParams values = defaults_of(type);
  json.field("lr", values.lr);
  json.field("weight_decay", values.weight_decay);
  found->second(json, values);
  std::vector<std::string> names;
  for (const auto& entry : out.items()) names.push_back(entry.key());
  return names;
}

void describe(JsonFields& json, OptimizerSection& s) {
  std::optional<std::string> type = s.given() ? std::optional(s.type) : std::nullopt;
  json.field("type", type);
  if (json.reading() && type) {
    s.type = canonical(json, *type);
    s.values = defaults_of(s.type);
  }
  const bool typed = described_types().contains(s.type);
  if (typed) {
    json.section("params", s, describe_params, UnknownKeys::kRefuse);
  } else {
    json.field("params", s.params);
  }
  json.field("legacy_fusion", s.legacy_fusion);
  if (!json.reading() || !typed) return;
  const nlohmann::ordered_json* written = json.find("params");
  if (written == nullptr || !written->is_object()) return;
  nlohmann::ordered_json values;
  JsonFields writer(values);
  describe_params(writer, s);
  s.params = *written;
  for (auto& [key, value] : s.params.items()) {
    if (value == "auto" && values.contains(key)) value = values[key];
  }
}

}  // namespace ds::engine::config
