#include "model/state/kept_buffers.h"

#include <algorithm>

#include "comm/agreement.h"
#include "core/log.h"
#include "core/name_pattern.h"

namespace ds::engine {
namespace {

bool is_in_any(const std::string& pattern, const std::vector<zero::Parameter>& list) {
  return std::any_of(list.begin(), list.end(), [&](const zero::Parameter& one) {
    return one.name_that([&](const std::string& name) { return is_found_in(pattern, name); }) != nullptr;
  });
}

// The kind of tensor that a pattern has found. The largest kind of all ranks counts, because ranks of a pipeline know
// only the layers of their own stages.
enum class Found { kNothing, kParameters, kBuffers };

Found look_for(const std::string& pattern, const ModelParameters& parameters,
               std::unordered_set<const void*>& buffers) {
  const bool names_parameters = is_in_any(pattern, parameters.trainable) || is_in_any(pattern, parameters.frozen);
  Found found = names_parameters ? Found::kParameters : Found::kNothing;
  for (const zero::Parameter& buffer : parameters.buffers) {
    if (!buffer.tensor.is_floating_point() || !is_found_in(pattern, buffer.name)) continue;
    buffers.insert(buffer.tensor.unsafeGetTensorImpl());
    found = Found::kBuffers;
  }
  return found;
}

}  // namespace

bool is_found_in(const std::string& pattern, const std::string& name) {
  return NamePattern::stars(pattern).matches(name, NamePart::kAnywhere);
}

std::unordered_set<const void*> buffers_kept_in_float32(const ModelParameters& parameters,
                                                        const std::vector<std::string>& patterns, const Ranks& ranks) {
  std::unordered_set<const void*> buffers;
  for (const std::string& pattern : patterns) {
    const Found here = look_for(pattern, parameters, buffers);
    const auto found = static_cast<Found>(
        comm::largest_of_ranks(static_cast<int64_t>(here), ranks.device, *ranks.world, "kept buffers"));
    if (found == Found::kBuffers || ranks.world->rank() != 0) continue;
    log::warning("data_types.keep_in_fp32_modules: \"", pattern, "\" has no effect: ",
                 found == Found::kParameters
                     ? "it is in names of parameters alone, which follow the model's dtype; their master weights are "
                       "those of the optimizer"
                     : "no floating-point buffer of the model has it in its name; remove it, or look at "
                       "module->named_buffers()");
  }
  return buffers;
}

}  // namespace ds::engine
