#include "config/tensor_checks.h"

#include "config/split/partition_config.h"
#include "core/check.h"

namespace ds::engine::config {
namespace {

void check_names(const TensorParallelSection& s, JsonProblems& problems) {
  const PartitionConfig partition = read_partition_config(
      s.partition_config,
      [&](const std::string& pointer, const std::string& message) { problems.error(pointer, message); });
  if (partition.tp_size > 1 && partition.tp_size != s.size()) {
    problems.error("/tensor_parallel/partition_config/tp_size",
                   cat("expected ", s.size(), ", which autotp_size and tp_size say, found ", partition.tp_size,
                       "; write tensor_parallel.autotp_size, and remove this key"));
  }
  const nlohmann::ordered_json& names = s.injection_policy_tuple;
  bool all_names = names.is_null() || names.is_array();
  for (const auto& name : names) all_names = all_names && name.is_string();
  if (!all_names) {
    problems.error("/tensor_parallel/injection_policy_tuple",
                   "expected a list of names of layers whose outputs are added, as [\"attention.output.dense\"]");
  }
}

}  // namespace

void check_tensor_parallel(const DsConfig& config, JsonProblems& problems) {
  const TensorParallelSection& s = config.tensor_parallel;
  check_names(s, problems);
  const auto python_only = [&](bool on, const char* key) {
    if (on) problems.warning(cat("/tensor_parallel/", key), "works in Python only, has no effect here");
  };
  python_only(s.vocab_parallel_ce_backend == "liger", "vocab_parallel_ce_backend");
  python_only(s.keep_module_on_host, "keep_module_on_host");
  python_only(s.replace_with_kernel_inject, "replace_with_kernel_inject");
  const auto without_ranks = [&](bool on, const char* key) {
    if (on && s.size() == 1)
      problems.warning(cat("/tensor_parallel/", key),
                       "has no effect with one rank for a layer; "
                       "set tensor_parallel.autotp_size");
  };
  without_ranks(s.sequence_parallel, "sequence_parallel");
  without_ranks(s.verify, "verify");
  without_ranks(s.tp_overlap_comm, "tp_overlap_comm");
}

}  // namespace ds::engine::config
