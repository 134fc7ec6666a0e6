#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {
namespace {

// Its sums are in every layer: it is to be the axis of the fastest links. Those inside a host are not looked at.
std::string hosts_of_axis(const PlanFacts& facts, int64_t ranks) {
  if (!facts.tensor_inside_host) return cat("inside a host where hosts have a multiple of ", ranks, " ranks");
  return *facts.tensor_inside_host ? "each axis lies inside a host" : "axes lie across hosts";
}

}  // namespace

void add_tensor_rows(const PlanFacts& facts, Plan& plan) {
  const int64_t ranks = plan.topology.tensor;
  if (ranks == 1) return;
  plan.rows.push_back({"tensor parallel",
                       cat(ranks, " neighbouring ranks have parts of the split parameters and get the same batches; ",
                           hosts_of_axis(facts, ranks)),
                       cat("tensor_parallel.autotp_size: ", ranks)});
  if (!facts.tensor_inside_host.value_or(true)) {
    plan.warnings.push_back(cat("tensor_parallel.autotp_size: ", ranks, ": the ", ranks,
                                " ranks of a tensor axis are on several hosts, and the sums of every layer go between ",
                                "them; choose a size that divides the ranks of a host"));
  }
  for (const SplitRow& row : facts.splits) plan.rows.push_back({cat("  ", row.names), row.what, row.reason});
  if (plan.tensor.split_parameters && plan.parameters) {
    plan.rows.push_back({"split parameters",
                         cat(*plan.tensor.split_parameters, " of the ", *plan.parameters, " elements of a rank are 1/",
                             plan.topology.tensor, " of larger ones"),
                         "the model, and the rules"});
  }
  if (plan.tensor.sequence_parallel) {
    plan.rows.push_back({"sequence parallel", "between layers each rank has a part of the sequence",
                         "tensor_parallel.sequence_parallel: true"});
  }
  if (plan.tensor.overlap) {
    plan.rows.push_back({"tp_overlap_comm", "sums of input gradients run beside the products of weight gradients",
                         "tensor_parallel.tp_overlap_comm: true"});
  }
  if (plan.tensor.verify) {
    plan.rows.push_back({"verified", "what is computed of parts is computed of wholes too, and compared; slow",
                         "tensor_parallel.verify: true"});
  }
}

}  // namespace ds::engine
