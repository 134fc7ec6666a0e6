#include "core/text.h"
#include "engine/plan/plan_rows.h"

namespace ds::engine {

void add_tensor_mode_rows(Plan& plan) {
  if (plan.topology.tensor == 1) return;
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
