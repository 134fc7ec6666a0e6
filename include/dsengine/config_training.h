// optimizer: {"type", "params"}. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace ds::engine::config {

// Every parameter of every optimizer type; the type's defaults are filled in, fields it does not know keep theirs.
struct OptimizerParams {
  double lr = 1e-3;  // Adagrad 1e-2, Muon 0.02
  double weight_decay = 0.0;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double momentum = 0.0;  // SGD; Muon 0.95

  // Adam, AdamW (and Muon's other half)
  bool bias_correction = true;  // also Lamb
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
  bool deepspeed_semantics = false;  // our own key: their first step and bias, see compression/onebit_adam.h
};

struct OptimizerSection {
  // Canonical: Adam, AdamW, Lamb, Adagrad, Lion, Muon, SGD, OneBitAdam, ...; empty: none in the file.
  std::string type;
  nlohmann::ordered_json params = nlohmann::ordered_json::object();  // as written, "auto" replaced
  OptimizerParams values;
  bool legacy_fusion = false;

  bool given() const { return !type.empty(); }
  // AdamW's decoupled weight decay: type AdamW, or Adam with adam_w_mode.
  bool decoupled_weight_decay() const { return type == "AdamW" || values.adam_w_mode; }
  // Ranks exchange compressed momenta, or the like, in place of gradients (compression/compressed_optimizer.h).
  bool compresses() const { return type == "OneBitAdam" || type == "OneBitLamb" || type == "ZeroOneAdam"; }
  // What runs: `type`, but AdamW for Adam with decoupled weight decay.
  std::string algorithm() const { return type == "Adam" && decoupled_weight_decay() ? "AdamW" : type; }
};

}  // namespace ds::engine::config
