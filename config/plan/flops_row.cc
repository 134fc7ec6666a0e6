#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {

void add_flops_row(const config::DsConfig& config, Plan& plan) {
  const config::FlopsProfilerSection& section = config.flops_profiler;
  if (!section.enabled) return;
  plan.rows.push_back({"flops profile",
                       section.profile_step < 0 ? std::string("of no step")
                                                : cat("of step ", section.profile_step + 1, ", ",
                                                      section.output_file ? cat("to the file ", *section.output_file)
                                                                          : std::string("in the log")),
                       cat("flops_profiler.enabled: true, profile_step: ", section.profile_step)});
}

}  // namespace ds::engine
