// Sections of a ds_config about training itself: fp16, bf16, fp8, torch_autocast, data_types, optimizer, scheduler and
// gradient_compression. Field names and defaults are the keys and defaults of ds_config; configs/README.md explains
// each.
//
// Plain values that the ds_config owns; safe from any thread; nothing throws. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace ds::engine::config {

// The dtypes "fp32", "bf16" and "fp16" of a ds_config. It cannot ask for float64: a model has that by itself.
enum class DType { kFloat32, kBFloat16, kFloat16, kFloat64 };

// The name that keys use.
const char* name_of(DType dtype);
// The bytes of an element.
inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// fp16
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

// bf16
struct Bf16Section {
  bool enabled = false;
  bool immediate_grad_update = false;
  bool check_grad_overflow = true;  // skip the step on inf or nan
  bool bf16_master_weights_and_grads = false;
  bool bf16_optimizer_states = false;
};

// fp8.recipe: scales follow the largest elements of earlier steps, or of the tensor at hand.
enum class Fp8Recipe { kDelayed, kCurrent };
// fp8.granularity: one scale for a tensor; or one for each 128 elements of a row and each 128 x 128 block of a weight.
enum class Fp8Granularity { kTensor, kBlock };

// fp8, a section of ours (docs/fp8.md): products of Linear layers on 8-bit floating point. Spelled as Transformer
// Engine and Megatron spell it.
struct Fp8Section {
  bool enabled = false;
  Fp8Recipe recipe = Fp8Recipe::kDelayed;
  Fp8Granularity granularity = Fp8Granularity::kTensor;
  std::string format = "hybrid";          // "hybrid": gradients are E5M2, all else E4M3; "e4m3": gradients too
  int64_t amax_history_len = 1024;        // delayed: optimizer steps that a scale looks back at
  std::string amax_compute_algo = "max";  // delayed: the "max" of that history, or its "most_recent" entry
  int64_t margin = 0;                     // scales are smaller by 2^margin
  bool fp8_wgrad = false;  // gradients of weights on FP8, too; else in the dtype that the layer was given
  std::vector<std::string> modules = {"*"};  // names of Linear layers, * for any text
  std::vector<std::string> exclude;          // names of Linear layers that stay as they are, * for any text
  bool emulate = false;                      // computes the same numbers without FP8 hardware, slowly: for tests
};

// torch_autocast
struct TorchAutocastSection {
  bool enabled = false;
  std::optional<DType> dtype;  // empty: bf16
  std::optional<std::vector<std::string>> lower_precision_safe_modules;
};

// data_types
struct DataTypesSection {
  std::optional<DType> grad_accum_dtype;                         // empty: the model's
  std::optional<DType> param_dtype;                              // must agree with fp16 / bf16
  std::optional<DType> buffer_dtype;                             // empty: fp16 and bf16 cast buffers, too
  std::optional<std::vector<std::string>> keep_in_fp32_modules;  // empty: "auto"
};

// optimizer.params: the parameters of all optimizer types. parse() fills in the defaults of the type; fields that the
// type does not know keep these.
struct OptimizerParams {
  double lr = 1e-3;  // Adagrad, RMSprop 1e-2, Muon 0.02, Adamax, NAdam 2e-3, Adadelta 1
  double weight_decay = 0.0;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;      // Adagrad, Muon 1e-10, Adadelta 1e-6
  double momentum = 0.0;  // SGD, RMSprop; Muon 0.95

  // Adam, AdamW (and Muon's other half)
  bool bias_correction = true;  // Lamb has it, too
  bool amsgrad = false;
  bool adam_w_mode = true;  // "Adam" means AdamW unless this is false
  bool torch_adam = false;  // accepted; the update is the same
  bool fp32_optimizer_states = true;

  // SGD, Adagrad
  double dampening = 0.0;
  bool nesterov = false;
  double lr_decay = 0.0;
  double initial_accumulator_value = 0.0;

  // Lamb, OneBitLamb
  double max_coeff = 10.0;
  double min_coeff = 0.01;
  bool eps_inside_sqrt = false;

  // Muon
  std::optional<double> muon_lr;   // empty: lr if it is given, else 0.02
  std::optional<double> adam_lr;   // empty: lr if it is given, else 3e-4
  std::string ns_method = "gram";  // "gram" or "standard"
  bool per_head_muon = false;
  int64_t head_dim = 0;  // per_head_muon: rows of one head in weights of queries, keys and values

  // RMSprop, Adadelta, NAdam, with torch's defaults; RAdam has decoupled_weight_decay
  double alpha = 0.99;
  bool centered = false;
  double rho = 0.9;
  double momentum_decay = 4e-3;
  bool decoupled_weight_decay = false;

  // OneBitAdam, OneBitLamb, ZeroOneAdam
  int64_t freeze_step = 100000;
  bool cuda_aware = false;
  std::string comm_backend_name = "nccl";
  double coeff_beta = 0.9;
  double factor_max = 4.0;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
  int64_t var_freeze_step = 100000;
  int64_t var_update_scaler = 16;
  int64_t local_step_scaler = 32678;
  int64_t local_step_clipper = 16;
  bool deepspeed_semantics = false;  // our own key: their first step and bias, docs/compression.md
};

// optimizer: {"type", "params"}.
struct OptimizerSection {
  // Canonical: Adam, AdamW, Lamb, Adagrad, Lion, Muon, SGD, OneBitAdam, ...; empty: none in the file.
  std::string type;
  nlohmann::ordered_json params = nlohmann::ordered_json::object();  // the keys as written, "auto" replaced
  OptimizerParams values;
  bool legacy_fusion = false;

  bool given() const { return !type.empty(); }  // whether the file has the section
  // Whether weight decay is decoupled, AdamW's: type AdamW, or Adam with adam_w_mode.
  bool decoupled_weight_decay() const;
  // Whether ranks exchange compressed momenta, or the like, in place of gradients (docs/compression.md).
  bool compresses() const;
  // The algorithm that runs: `type`, but AdamW for Adam with decoupled weight decay.
  std::string algorithm() const;
};

// scheduler: {"type", "params"}.
struct SchedulerSection {
  std::string type;  // "WarmupLR", "CosineAnnealingLR", ...; empty: none in the file
  nlohmann::ordered_json params = nlohmann::ordered_json::object();  // the keys as written, "auto" replaced
  std::optional<optimizers::LrScheduleOptions> options;              // empty: this build lacks the type
  int64_t last_batch_iteration = -1;                                 // where the schedule starts: -1 is its beginning

  bool given() const { return !type.empty(); }  // whether the file has the section
};

// gradient_compression.method
enum class CompressionMethod { kNone, kFloat16, kBFloat16, kInt8, kTopK, kPowerSgd, kSign };

// The name that the key uses.
const char* name_of(CompressionMethod method);

// gradient_compression, a section of ours (docs/gradient_compression.md)
struct GradientCompressionSection {
  CompressionMethod method = CompressionMethod::kNone;
  double top_k = 0.01;              // top_k: share of the elements that are sent
  int64_t rank = 4;                 // power_sgd: columns of the factors
  int64_t start_step = 0;           // optimizer steps before it begins
  bool error_feedback = true;       // the part that is not sent is added to the next gradient
  bool between_nodes_only = false;  // inside a node gradients are added as they are

  // Whether the method does more than send another dtype.
  bool compresses() const {
    return method != CompressionMethod::kNone && method != CompressionMethod::kFloat16 &&
           method != CompressionMethod::kBFloat16;
  }
};

}  // namespace ds::engine::config
