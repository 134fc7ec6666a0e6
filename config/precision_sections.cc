#include "dsengine/config_training.h"

#include "config/describe.h"
#include "core/check.h"

namespace ds::engine::config {
namespace {

constexpr JsonRange kInteger = {.booleans = false};

}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
    case DType::kFloat64:
      return "fp64";
  }
  throw InternalError("unknown DType");
}

const JsonFields::Names<DType>& dtype_names() {
  // The first name of each is the one that is written.
  static const JsonFields::Names<DType> kNames = {
      {"fp32", DType::kFloat32},          {"bf16", DType::kBFloat16},
      {"fp16", DType::kFloat16},          {"float32", DType::kFloat32},
      {"bfloat16", DType::kBFloat16},     {"float16", DType::kFloat16},
      {"float", DType::kFloat32},         {"half", DType::kFloat16},
      {"torch.float32", DType::kFloat32}, {"torch.bfloat16", DType::kBFloat16},
      {"torch.float16", DType::kFloat16}};
  return kNames;
}

void describe(JsonFields& json, Fp16Section& s) {
  json.field("enabled", s.enabled);
  json.field("auto_cast", s.auto_cast);
  json.field("loss_scale", s.loss_scale, JsonRange{.minimum = 0, .booleans = false});
  json.field("initial_scale_power", s.initial_scale_power);
  json.field("loss_scale_window", s.loss_scale_window, kInteger);
  json.field("hysteresis", s.hysteresis);
  json.field("consecutive_hysteresis", s.consecutive_hysteresis);
  json.field("min_loss_scale", s.min_loss_scale, kInteger);
  json.field("fp16_master_weights_and_grads", s.fp16_master_weights_and_grads);
  if (!json.reading() || !s.enabled || s.loss_scale != 0) return;
  if (s.loss_scale_window <= 0) {
    json.error("loss_scale_window",
               cat("expected an integer > 0 with a dynamic loss scale (loss_scale 0), found ", s.loss_scale_window));
  }
  if (s.min_loss_scale <= 0) {
    json.error("min_loss_scale",
               cat("expected an integer > 0 with a dynamic loss scale (loss_scale 0), found ", s.min_loss_scale));
  }
}

void describe(JsonFields& json, Fp8Section& s) {
  json.field("enabled", s.enabled);
  json.enumerator("recipe", s.recipe, {{"delayed", Fp8Recipe::kDelayed}, {"current", Fp8Recipe::kCurrent}});
  json.enumerator("granularity", s.granularity,
                  {{"tensor", Fp8Granularity::kTensor}, {"block", Fp8Granularity::kBlock}});
  json.choice("format", s.format, {"hybrid", "e4m3"});
  json.field("amax_history_len", s.amax_history_len, JsonRange{.minimum = 1, .booleans = false});
  json.choice("amax_compute_algo", s.amax_compute_algo, {"max", "most_recent"});
  json.field("margin", s.margin, JsonRange{.minimum = 0, .maximum = 16, .booleans = false});
  json.field("fp8_wgrad", s.fp8_wgrad);
  json.field("modules", s.modules);
  json.field("exclude", s.exclude);
  json.field("emulate", s.emulate);
  if (!json.reading() || !s.enabled) return;
  if (s.granularity == Fp8Granularity::kBlock && s.recipe == Fp8Recipe::kDelayed) {
    json.error("recipe", json.keys().has("recipe")
                             ? "\"delayed\" excludes granularity \"block\", whose scales are those of the tensor at "
                               "hand; use \"current\""
                             : "expected \"current\" with granularity \"block\", whose scales are those of the "
                               "tensor at hand, found none, which means \"delayed\"");
  }
  if (s.granularity == Fp8Granularity::kBlock && s.fp8_wgrad) {
    json.error("fp8_wgrad", "expected false with granularity \"block\", found true");
  }
  if (s.modules.empty()) json.error("modules", "expected at least one pattern, found none; \"*\" is every layer");
}

void describe(JsonFields& json, Bf16Section& s) {
  json.field("enabled", s.enabled);
  json.field("immediate_grad_update", s.immediate_grad_update);
  json.field("check_grad_overflow", s.check_grad_overflow);
  json.field("bf16_master_weights_and_grads", s.bf16_master_weights_and_grads);
  json.field("bf16_optimizer_states", s.bf16_optimizer_states);
}

void describe(JsonFields& json, TorchAutocastSection& s) {
  json.field("enabled", s.enabled);
  json.enumerator("dtype", s.dtype, dtype_names());
  json.field("lower_precision_safe_modules", s.lower_precision_safe_modules);
}

void describe(JsonFields& json, DataTypesSection& s) {
  json.enumerator("grad_accum_dtype", s.grad_accum_dtype, dtype_names());
  json.enumerator("param_dtype", s.param_dtype, dtype_names());
  json.enumerator("buffer_dtype", s.buffer_dtype, dtype_names());
  json.field_or_auto("keep_in_fp32_modules", s.keep_in_fp32_modules);
}

}  // namespace ds::engine::config
