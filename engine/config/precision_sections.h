// fp16, bf16, torch_autocast, data_types. Field names and defaults are the keys and defaults of ds_config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

enum class DType { kFloat32, kBFloat16, kFloat16 };  // "fp32", "bf16", "fp16"

const char* name_of(DType dtype);
inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Fp16Section {
  bool enabled = false;
  bool auto_cast = false;               // cast floating-point inputs of forward
  double loss_scale = 0.0;              // 0 = dynamic
  int64_t initial_scale_power = 16;     // the first dynamic scale is 2^p
  int64_t loss_scale_window = 1000;     // good steps before the scale doubles
  int64_t hysteresis = 2;               // overflows before it halves
  bool consecutive_hysteresis = false;  // refill hysteresis at every good step
  int64_t min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;
};

struct Bf16Section {
  bool enabled = false;
  bool immediate_grad_update = false;
  bool check_grad_overflow = true;  // skip the step on inf or nan
  bool bf16_master_weights_and_grads = false;
  bool bf16_optimizer_states = false;
};

struct TorchAutocastSection {
  bool enabled = false;
  std::optional<DType> dtype;  // empty: bf16
  std::optional<std::vector<std::string>> lower_precision_safe_modules;
};

struct DataTypesSection {
  std::optional<DType> grad_accum_dtype;                         // empty: the model's
  std::optional<DType> param_dtype;                              // must agree with fp16 / bf16
  std::optional<DType> buffer_dtype;                             // empty: buffers stay as they are
  std::optional<std::vector<std::string>> keep_in_fp32_modules;  // empty: "auto"
};

}  // namespace ds::engine::config
