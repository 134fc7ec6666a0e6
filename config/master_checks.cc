#include "config/master_checks.h"

#include <string>

#include "core/check.h"
#include "optim/optimizer_table.h"

namespace ds::engine::config {
namespace {

// Tells whether DeepSpeed would run its CPU Adam; torch's Adam has another update there. Without a type the program
// brings the optimizer.
bool is_cpu_adam(const OptimizerSection& section) {
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(section.type);
  return !section.given() || (row != nullptr && row->is_cpu_adam && !section.values.torch_adam);
}

void check_stage(const DsConfig& c, const std::string& pointer, JsonProblems& problems) {
  if (c.zero_optimization.stage == 0) problems.error(pointer, "needs zero_optimization.stage 1, 2 or 3, found 0");
}

// `instead`: what else would do.
void check_offloaded(const DsConfig& c, const std::string& pointer, const char* instead, JsonProblems& problems) {
  if (c.zero_optimization.optimizer_device() == OffloadDevice::kNone) {
    problems.error(pointer,
                   cat("needs zero_optimization.offload_optimizer.device \"cpu\" or \"nvme\", found \"none\"; ",
                       "add the section", instead));
  }
  if (!is_cpu_adam(c.optimizer)) {
    problems.error(pointer, cat("needs optimizer.type Adam or AdamW",
                                c.optimizer.values.torch_adam ? " without optimizer.params.torch_adam: true" : "",
                                ", found ", c.optimizer.type, instead));
  }
}

void check_on_device(const DsConfig& c, const std::string& pointer, JsonProblems& problems) {
  if (!c.optimizer.compresses()) return;
  problems.error(pointer,
                 cat("excludes optimizer.type ", c.optimizer.type, ", whose errors of compression are float32 ",
                     "sums with its masters; use another optimizer, or remove the key"));
}

}  // namespace

void check_masters(const DsConfig& c, JsonProblems& problems) {
  const std::string fp16 = "/fp16/fp16_master_weights_and_grads";
  const std::string bf16 = "/bf16/bf16_master_weights_and_grads";
  if (c.fp16.fp16_master_weights_and_grads) {
    check_stage(c, fp16, problems);
    check_offloaded(c, fp16, "", problems);
    if (!c.fp16.enabled) problems.warning(fp16, "means nothing while fp16.enabled is false");
  }
  if (c.bf16.bf16_master_weights_and_grads) {
    check_stage(c, bf16, problems);
    if (c.bf16.bf16_optimizer_states && c.zero_optimization.optimizer_device() == OffloadDevice::kNone) {
      check_on_device(c, bf16, problems);
    } else {
      check_offloaded(c, bf16, ", or bf16.bf16_optimizer_states: true without offload_optimizer", problems);
    }
    if (!c.bf16.enabled) problems.warning(bf16, "means nothing while bf16.enabled is false");
  }
  if (c.fp16.fp16_master_weights_and_grads && c.bf16.bf16_master_weights_and_grads) {
    problems.error(fp16, "excludes bf16.bf16_master_weights_and_grads; set one of them");
  }
  if (!c.bf16.bf16_optimizer_states) return;
  const std::string states = "/bf16/bf16_optimizer_states";
  if (!c.bf16.bf16_master_weights_and_grads) {
    problems.error(states, "needs bf16.bf16_master_weights_and_grads true, found false");
  }
  check_stage(c, states, problems);
}

}  // namespace ds::engine::config
