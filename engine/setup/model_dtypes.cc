#include "engine/setup/model_dtypes.h"

#include <algorithm>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"

namespace ds::engine {
namespace {

void count_half(const zero::Parameter& parameter, DType dtype, std::vector<GivenDtype>& halves) {
  const auto is_same = [&](const GivenDtype& given) { return given.dtype == dtype; };
  auto found = std::find_if(halves.begin(), halves.end(), is_same);
  if (found == halves.end()) found = halves.insert(found, {.dtype = dtype, .first = parameter.name});
  ++found->count;
}

}  // namespace

void add_dtypes(const ModelParameters& parameters, PlanFacts& facts) {
  const zero::Parameter* other = nullptr;  // than float64
  int64_t float64 = 0;
  for (const auto* list : {&parameters.trainable, &parameters.frozen}) {
    for (const zero::Parameter& parameter : *list) {
      ++facts.tensors;
      const at::ScalarType dtype = parameter.tensor.scalar_type();
      if (dtype == at::kDouble) {
        if (++float64 == 1) facts.first_float64 = parameter.name;
        continue;
      }
      if (!other) other = &parameter;
      if (dtype == at::kBFloat16) count_half(parameter, DType::kBFloat16, facts.halves);
      if (dtype == at::kHalf) count_half(parameter, DType::kFloat16, facts.halves);
    }
  }
  require(float64 == 0 || !other, "model: ", float64, " of ", facts.tensors,
          " parameters are float64 (first: ", facts.first_float64, "), others are not (",
          other ? other->name : std::string(), ": ", other ? other->tensor.scalar_type() : at::kDouble,
          "): an engine trains a model in one dtype. Convert it ",
          "before initialize(): model->to(torch::kDouble), which loses nothing, or model->to(torch::kFloat)");
}

void require_one_precision(const PlanFacts& facts, const Ranks& ranks) {
  const int64_t own = facts.first_float64.empty() ? 0 : 1;
  const char* label = "float64 layers";
  const bool any = largest_of_ranks(own, ranks.device, *ranks.world, label) == 1;
  const bool all = largest_of_ranks(-own, ranks.device, *ranks.world, label) == -1;
  require(!any || all, "pipeline: layers of some stages are float64, those of others are not (here: ",
          own == 1 ? facts.first_float64 : std::string("none is"), "): an engine trains a model in one dtype; make ",
          "all layers float64, or none");
}

}  // namespace ds::engine
