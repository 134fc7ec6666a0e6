#include "config/plan/plan_choices.h"

#include <string>

#include "core/check.h"
#include "core/text.h"
#include "optim/optimizer_table.h"

namespace ds::engine {
namespace {

using config::DsConfig;

// Refuses whatever would round a model whose user has asked for 53 bits.
void require_float64_kept(const DsConfig& config, const PlanFacts& facts) {
  const auto require_absent = [&](bool asked, const std::string& key, const char* why) {
    require<ConfigError>(!asked, key, ": excludes float64 parameters (", facts.first_float64, " and all others): ", why,
                         ". Remove the key, or convert the model before initialize() with model->to(torch::kFloat)");
  };
  const config::ZeroSection& zero = config.zero_optimization;
  const std::string& optimizer = config.optimizer.type;
  constexpr const char* kInteger = "it sends integers of a few bits";
  require_absent(config.fp16.enabled, "fp16.enabled: true", "it casts them to float16");
  require_absent(config.bf16.enabled, "bf16.enabled: true", "it casts them to bfloat16");
  require_absent(config.torch_autocast.enabled, "torch_autocast.enabled: true",
                 "LibTorch's autocast leaves float64 as it is");
  require_absent(config.data_types.param_dtype.has_value(), "data_types.param_dtype", "it names another dtype");
  require_absent(config.data_types.grad_accum_dtype.has_value(), "data_types.grad_accum_dtype",
                 "gradients are added in float64");
  require_absent(config.data_types.buffer_dtype.has_value(), "data_types.buffer_dtype",
                 "operators want buffers in the dtype of the parameters");
  require_absent(config.communication_data_type.has_value(), "communication_data_type",
                 "gradients are reduced in float64");
  require_absent(config.gradient_compression.method != config::CompressionMethod::kNone,
                 cat("gradient_compression.method: ", name_of(config.gradient_compression.method)),
                 "gradients are reduced in float64");
  require_absent(config.sparse_gradients, "sparse_gradients: true", "it adds rows in float32");
  require_absent(zero.zero_quantized_weights, "zero_optimization.zero_quantized_weights: true", kInteger);
  require_absent(zero.zero_quantized_nontrainable_weights,
                 "zero_optimization.zero_quantized_nontrainable_weights: true", "it keeps integers of 8 bits");
  require_absent(zero.zero_quantized_gradients, "zero_optimization.zero_quantized_gradients: true", kInteger);
  require_absent(!facts.client_optimizer && config.optimizer.compresses(), cat("optimizer.type: ", optimizer),
                 "it exchanges momenta of one bit");
}

// Decides the dtype of masters and optimizer states; no other place does.
void choose_masters(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const char* const key = config.narrow_masters();
  require<ConfigError>(key == nullptr || !facts.client_optimizer, key != nullptr ? key : "", ": true excludes an ",
                       "optimizer of the program (", facts.client_name, "), which has masters and states of its own; ",
                       "remove the key, or give the optimizer in the ds_config");
  plan.master_dtype = key != nullptr ? plan.model_dtype : DType::kFloat32;
  const bool wide_states = config.optimizer.values.fp32_optimizer_states || facts.client_optimizer;
  const bool narrow_states = (config.bf16.enabled && config.bf16.bf16_optimizer_states) || !wide_states;
  plan.state_dtype = narrow_states ? plan.model_dtype : DType::kFloat32;
  plan.separate_master = plan.master_dtype != plan.model_dtype;
  constexpr double kHalfUnit = 1.0 / 512;  // of a bfloat16, at least
  const double beta2 = config.optimizer.values.betas[1];
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(config.optimizer.type);
  const bool averages = row != nullptr && row->averages_squares;
  if (plan.state_dtype == DType::kBFloat16 && averages && 1 - beta2 < kHalfUnit) {
    plan.warnings.push_back(cat(
        "optimizer.params.betas[1]: ", beta2, " with optimizer states in bf16: the mean of squares cannot fall, as ",
        "a step takes less of it away than bf16 can tell. Use at most 0.99, or states in fp32"));
  }
  if (plan.state_dtype == DType::kFloat16) {
    plan.warnings.emplace_back(
        "optimizer.params.fp32_optimizer_states: false keeps squares of gradients in fp16, where what is below 6e-8 is "
        "0 and a step is then limited by eps alone. Use bf16, whose range is that of float32, or true");
  }
}

}  // namespace

bool is_half(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

bool narrows_buffers(const Plan& plan) { return plan.buffer_dtype && is_half(*plan.buffer_dtype); }

bool scales_autocast(const DsConfig& config) {
  const config::TorchAutocastSection& section = config.torch_autocast;
  return section.enabled && section.dtype == DType::kFloat16 && !config.fp16.enabled && !config.bf16.enabled;
}

void choose_precision(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  plan.model_dtype = config.model_dtype();
  plan.gradient_dtype = config.data_types.grad_accum_dtype.value_or(plan.model_dtype);
  plan.communication_dtype = config.communication_data_type.value_or(plan.model_dtype);
  choose_masters(config, facts, plan);
  plan.buffer_dtype = config.data_types.buffer_dtype;
  // DeepSpeed's module.bfloat16() and module.half() do so, too: kernels of normalisation want one dtype.
  if (is_half(plan.model_dtype) && !plan.buffer_dtype) plan.buffer_dtype = plan.model_dtype;
  plan.cast_inputs = config.fp16.enabled && config.fp16.auto_cast;
  if (config.torch_autocast.enabled) plan.autocast = config.torch_autocast.dtype.value_or(DType::kBFloat16);
  if (config.fp16.enabled && plan.trains) {
    plan.loss_scaling = config.fp16.loss_scale == 0 ? LossScaling::kDynamic : LossScaling::kStatic;
  } else if (scales_autocast(config) && plan.trains) {
    plan.loss_scaling = LossScaling::kDynamic;
  }
}

void change_to_float64(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  require_float64_kept(config, facts);
  for (DType* dtype :
       {&plan.model_dtype, &plan.gradient_dtype, &plan.communication_dtype, &plan.master_dtype, &plan.state_dtype}) {
    *dtype = DType::kFloat64;
  }
  plan.separate_master = false;
  // The kernels for the host that leave a gradient as it is do not know float64.
  plan.offload.speculation_copies_gradient = plan.offload.speculative;
}

void note_casts(const PlanFacts& facts, Plan& plan) {
  for (const GivenDtype& given : facts.halves) {
    if (given.dtype == plan.model_dtype) continue;
    const char* from = name_of(given.dtype);
    const char* to = name_of(plan.model_dtype);
    const std::string which =
        cat(given.count, " of ", facts.tensors, " parameters (", given.first, given.count > 1 ? ", ...)" : ")");
    if (is_half(plan.model_dtype)) {
      plan.rows.push_back({"cast", cat(which, " from ", from, " to ", to), cat(to, ".enabled: true")});
      continue;
    }
    plan.rows.push_back({"cast", cat(which, " from ", from, " to ", to, ", in which they are trained"),
                         cat("no \"", from, "\" section: \"", from, "\": {\"enabled\": true} trains in ", from)});
    plan.warnings.push_back(cat(which, given.count == 1 ? " is " : " are ", from, ", which the ds_config does not ask ",
                                "for: cast to ", to, ", with the memory and speed of ", to, ". To train in ", from,
                                " write \"", from, "\": {\"enabled\": true}, which casts the whole model and keeps ",
                                "float32 masters; to train in ", to, " leave out the conversion, which has rounded ",
                                "these weights"));
  }
}

void note_products(const config::DsConfig& config, Plan& plan) {
  if (const config::Fp8Section& fp8 = config.fp8; fp8.enabled) {
    const bool delayed = fp8.recipe == config::Fp8Recipe::kDelayed;
    const bool blocks = fp8.granularity == config::Fp8Granularity::kBlock;
    plan.rows.push_back(
        {"linear layers",
         cat("on FP8, ", fp8.format == "hybrid" ? "E4M3 and E5M2" : "E4M3", ", ", delayed ? "delayed" : "current",
             " scaling per ", blocks ? "128-block" : "tensor", fp8.emulate ? ", emulated" : ""),
         "fp8.enabled: true"});
  }
  if (const auto& precision = config.float32_matmul_precision) {
    plan.rows.push_back({"float32 products",
                         *precision == "highest" ? "in float32" : cat(*precision, ": TF32 on a GPU"),
                         cat("float32_matmul_precision: ", *precision)});
  }
  if (!config.sdpa_backends) return;
  std::string names;
  for (const std::string& name : *config.sdpa_backends) names += cat(names.empty() ? "" : ", ", name);
  plan.rows.push_back({"attention on a GPU", names, "sdpa_backends"});
}

}  // namespace ds::engine
