#include "optim/optimizer_table.h"

#include "core/ascii.h"
#include "core/check.h"
#include "core/json/json_fields.h"

namespace ds::optimizers {
namespace {

constexpr JsonRange kBelowOne = {.minimum = 0, .maximum = 1, .open_maximum = true};

void betas_key(JsonFields& json, OptimizerParams& p) {
  json.field("betas", p.betas);
  for (const double beta : p.betas) {
    if (json.reading() && !kBelowOne.accepts(beta)) {
      json.error("betas", cat("expected numbers >= 0 and < 1, found ", beta));
    }
  }
}

// Accepts choices of an implementation, which change no result and have no effect here.
void ignore_implementation(JsonFields& json) {
  for (const char* hint : {"foreach", "fused", "capturable", "set_grad_none"}) json.keys().declare(hint);
}

// Takes any text as true, as Python does: programs for other accelerators name an implementation here ("torch_impl").
void torch_adam_key(JsonFields& json, OptimizerParams& p) {
  const nlohmann::ordered_json* value = json.keys().peek("torch_adam");
  bool word = false;
  if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().empty() ||
      ds::convert(*value, word)) {
    return json.field("torch_adam", p.torch_adam);
  }
  json.keys().declare("torch_adam");
  json.warning("torch_adam",
               cat("expected true or false, found ", shown(*value), "; taken as true, as Python takes it"));
  p.torch_adam = true;
}

void adam_keys(JsonFields& json, OptimizerParams& p) {
  betas_key(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("bias_correction", p.bias_correction);
  json.field("amsgrad", p.amsgrad);
  torch_adam_key(json, p);
  json.field("adam_w_mode", p.adam_w_mode);
  json.field("fp32_optimizer_states", p.fp32_optimizer_states);
  ignore_implementation(json);
}

void lamb_keys(JsonFields& json, OptimizerParams& p) {
  betas_key(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("bias_correction", p.bias_correction);
  json.field("eps_inside_sqrt", p.eps_inside_sqrt);
  json.field("max_coeff", p.max_coeff, above(0));
  json.field("min_coeff", p.min_coeff, at_least(0));
  json.field("amsgrad", p.amsgrad);
  if (json.reading() && p.amsgrad) json.error("amsgrad", "expected false: there is no AMSGrad form of this optimizer");
}

void muon_keys(JsonFields& json, OptimizerParams& p) {
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
  betas_key(json, p);
  json.field("eps", p.eps, at_least(0));
  json.field("adam_w_mode", p.adam_w_mode);
  torch_adam_key(json, p);
  json.field("fp32_optimizer_states", p.fp32_optimizer_states);
  ignore_implementation(json);
}

void sgd_keys(JsonFields& json, OptimizerParams& p) {
  json.field("momentum", p.momentum, at_least(0));
  json.field("dampening", p.dampening);
  json.field("nesterov", p.nesterov);
  ignore_implementation(json);
  if (json.reading() && p.nesterov && (p.momentum <= 0 || p.dampening != 0)) {
    json.error("nesterov", cat("expected momentum > 0 and dampening 0 with nesterov, found momentum ", p.momentum,
                               " and dampening ", p.dampening));
  }
}

void adagrad_keys(JsonFields& json, OptimizerParams& p) {
  json.field("eps", p.eps, at_least(0));
  json.field("lr_decay", p.lr_decay, at_least(0));
  json.field("initial_accumulator_value", p.initial_accumulator_value, at_least(0));
  if (json.reading() && json.keys().has("amsgrad")) json.warning("amsgrad", "means nothing to Adagrad, ignored");
  json.keys().declare("amsgrad");
  ignore_implementation(json);
}

void sparse_adam_keys(JsonFields& json, OptimizerParams& p) {
  betas_key(json, p);
  json.field("eps", p.eps, at_least(0));
  ignore_implementation(json);
  if (json.reading() && p.weight_decay != 0) {
    json.error("weight_decay", cat("expected 0, found ", p.weight_decay,
                                   ": SparseAdam leaves rows without a gradient as they are; remove it, or use AdamW"));
  }
}

void lion_keys(JsonFields& json, OptimizerParams& p) {
  betas_key(json, p);
  ignore_implementation(json);
}

void rmsprop_keys(JsonFields& json, OptimizerParams& p) {
  json.field("alpha", p.alpha, at_least(0));
  json.field("eps", p.eps, at_least(0));
  json.field("momentum", p.momentum, at_least(0));
  json.field("centered", p.centered);
  ignore_implementation(json);
}

void adamax_keys(JsonFields& json, OptimizerParams& p) {
  betas_key(json, p);
  json.field("eps", p.eps, at_least(0));
  ignore_implementation(json);
}

void radam_keys(JsonFields& json, OptimizerParams& p) {
  adamax_keys(json, p);
  json.field("decoupled_weight_decay", p.decoupled_weight_decay);
}

void nadam_keys(JsonFields& json, OptimizerParams& p) {
  radam_keys(json, p);
  json.field("momentum_decay", p.momentum_decay, at_least(0));
}

void adadelta_keys(JsonFields& json, OptimizerParams& p) {
  json.field("rho", p.rho, {.minimum = 0, .maximum = 1});
  json.field("eps", p.eps, at_least(0));
  ignore_implementation(json);
}

void one_bit_keys(JsonFields& json, OptimizerParams& p) {
  lamb_keys(json, p);
  json.field("cuda_aware", p.cuda_aware);
  json.choice("comm_backend_name", p.comm_backend_name, {"nccl", "mpi", "hccl", "compressed", "gloo"});
  json.field("deepspeed_semantics", p.deepspeed_semantics);
  json.keys().declare("max_grad_norm");
}

// Refuses eps_inside_sqrt for optimizers that divide by sqrt(v) + eps after the freeze.
void refuse_eps_inside_sqrt(JsonFields& json, const OptimizerParams& p) {
  if (json.reading() && p.eps_inside_sqrt) {
    json.error("eps_inside_sqrt", "expected false: only Lamb and OneBitLamb have this form");
  }
}

void one_bit_adam_keys(JsonFields& json, OptimizerParams& p) {
  one_bit_keys(json, p);
  refuse_eps_inside_sqrt(json, p);
  json.field("freeze_step", p.freeze_step, at_least(0));
}

void one_bit_lamb_keys(JsonFields& json, OptimizerParams& p) {
  one_bit_keys(json, p);
  json.field("freeze_step", p.freeze_step, at_least(0));
  json.field("coeff_beta", p.coeff_beta, kBelowOne);
  json.field("factor_max", p.factor_max, above(0));
  json.field("factor_min", p.factor_min, at_least(0));
  json.field("factor_threshold", p.factor_threshold, at_least(0));
}

void zero_one_adam_keys(JsonFields& json, OptimizerParams& p) {
  one_bit_keys(json, p);
  refuse_eps_inside_sqrt(json, p);
  json.field("var_freeze_step", p.var_freeze_step, at_least(0));
  json.field("var_update_scaler", p.var_update_scaler, above(0));
  json.field("local_step_scaler", p.local_step_scaler, above(0));
  json.field("local_step_clipper", p.local_step_clipper, above(0));
}

template <int64_t kCount>
int64_t always(const OptimizerParams& /*params*/) {
  return kCount;
}

int64_t adam_states(const OptimizerParams& params) { return params.amsgrad ? 3 : 2; }

int64_t sgd_states(const OptimizerParams& params) { return params.momentum != 0 ? 1 : 0; }

int64_t rmsprop_states(const OptimizerParams& params) {
  return 1 + (params.momentum > 0 ? 1 : 0) + (params.centered ? 1 : 0);
}

using Type = OptimizerType;

// Optimizers with kernels of ours.
std::vector<OptimizerDescription> rows_of_own_kernels() {
  return {{.type = Type::kAdam,
           .name = "Adam",
           .describe_keys = adam_keys,
           .state_tensors = adam_states,
           .averages_squares = true,
           .is_cpu_adam = true},
          {.type = Type::kAdamW,
           .name = "AdamW",
           .describe_keys = adam_keys,
           .state_tensors = adam_states,
           .averages_squares = true,
           .is_cpu_adam = true},
          {.type = Type::kLamb,
           .name = "Lamb",
           .describe_keys = lamb_keys,
           .state_tensors = always<2>,
           .elementwise = false,
           .tested_with_zero = false,
           .averages_squares = true,
           .dynamic_scale_only = true},
          {.type = Type::kAdagrad,
           .name = "Adagrad",
           .describe_keys = adagrad_keys,
           .state_tensors = always<1>,
           .defaults = {.lr = 1e-2, .eps = 1e-10},
           .updates_rows = true},
          {.type = Type::kSparseAdam,
           .name = "SparseAdam",
           .describe_keys = sparse_adam_keys,
           .state_tensors = always<2>,
           .averages_squares = true,
           .updates_rows = true},
          {.type = Type::kLion, .name = "Lion", .describe_keys = lion_keys, .state_tensors = always<1>},
          {.type = Type::kMuon,
           .name = "Muon",
           .describe_keys = muon_keys,
           .state_tensors = always<1>,
           .defaults = {.lr = 0.02, .betas = {0.9, 0.95}, .eps = 1e-10, .momentum = 0.95},
           .values_of_rest = GroupOptions{.lr = 3e-4, .beta2 = 0.95, .eps = 1e-10},
           .elementwise = false}};
}

// Elementwise optimizers after those of torch.
std::vector<OptimizerDescription> rows_after_torch() {
  return {{.type = Type::kSgd,
           .name = "SGD",
           .describe_keys = sgd_keys,
           .state_tensors = sgd_states,
           .tested_with_zero = false,
           .preserves_gradient = false,
           .updates_rows = true},
          {.type = Type::kRmsprop,
           .name = "RMSprop",
           .describe_keys = rmsprop_keys,
           .state_tensors = rmsprop_states,
           .defaults = {.lr = 1e-2},
           .tested_with_zero = false},
          {.type = Type::kAdamax,
           .name = "Adamax",
           .describe_keys = adamax_keys,
           .state_tensors = always<2>,
           .defaults = {.lr = 2e-3},
           .tested_with_zero = false},
          {.type = Type::kNadam,
           .name = "NAdam",
           .describe_keys = nadam_keys,
           .state_tensors = always<2>,
           .defaults = {.lr = 2e-3},
           .tested_with_zero = false,
           .averages_squares = true},
          {.type = Type::kRadam,
           .name = "RAdam",
           .describe_keys = radam_keys,
           .state_tensors = always<2>,
           .tested_with_zero = false,
           .averages_squares = true},
          {.type = Type::kAdadelta,
           .name = "Adadelta",
           .describe_keys = adadelta_keys,
           .state_tensors = always<2>,
           .defaults = {.lr = 1.0, .eps = 1e-6},
           .tested_with_zero = false}};
}

// Optimizers that exchange compressed momenta in place of gradients.
std::vector<OptimizerDescription> rows_that_compress() {
  return {{.type = Type::kOneBitAdam,
           .name = "OneBitAdam",
           .describe_keys = one_bit_adam_keys,
           .state_tensors = always<2>,
           .compresses = true,
           .last_stage = 2,
           .has_frozen_groups = true},
          {.type = Type::kOneBitLamb,
           .name = "OneBitLamb",
           .describe_keys = one_bit_lamb_keys,
           .state_tensors = always<3>,
           .elementwise = false,
           .compresses = true,
           .last_stage = 2},
          {.type = Type::kZeroOneAdam,
           .name = "ZeroOneAdam",
           .describe_keys = zero_one_adam_keys,
           .state_tensors = always<3>,
           .compresses = true,
           .last_stage = 0}};
}

}  // namespace

const std::vector<OptimizerDescription>& optimizer_table() {
  static const std::vector<OptimizerDescription> kRows = [] {
    std::vector<OptimizerDescription> rows = rows_of_own_kernels();
    for (const auto& more : {rows_after_torch(), rows_that_compress()})
      rows.insert(rows.end(), more.begin(), more.end());
    return rows;
  }();
  return kRows;
}

const OptimizerDescription* find_optimizer(std::string_view name) {
  for (const OptimizerDescription& row : optimizer_table()) {
    if (equal_in_any_case(row.name, name)) return &row;
  }
  return nullptr;
}

std::string optimizer_names(bool (*chosen)(const OptimizerDescription& row)) {
  std::vector<std::string> names;
  for (const OptimizerDescription& row : optimizer_table()) {
    if (chosen(row)) names.push_back(row.name);
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += cat(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ", names[i]);
  }
  return text;
}

bool updates_alone(const OptimizerDescription& row) { return row.elementwise && !row.compresses; }

int64_t state_tensors_of(std::string_view name, const OptimizerParams& params) {
  const OptimizerDescription* const row = find_optimizer(name);
  return row != nullptr ? row->state_tensors(params) : 0;
}

GroupOptions group_options(const OptimizerParams& params) {
  return {.lr = params.lr,
          .weight_decay = params.weight_decay,
          .beta1 = params.betas[0],
          .beta2 = params.betas[1],
          .momentum = params.momentum,
          .eps = params.eps};
}

}  // namespace ds::optimizers
