#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {

void add_comms_log_row(const config::DsConfig& config, Plan& plan) {
  const config::CommsLoggerSection& section = config.comms_logger;
  if (!section.enabled) return;
  std::string names;
  for (const std::string& name : section.prof_ops) names += cat(names.empty() ? "" : ", ", name);
  const bool nothing = !section.prof_all && names.empty();
  std::string text = section.prof_all ? "all operations" : nothing ? "no operation: prof_ops is empty" : names;
  if (!nothing) {
    text += cat(", by group", section.debug ? ", label" : "", " and size; a table at the end",
                section.verbose ? ", and a line for each one on rank 0" : "");
  }
  plan.rows.push_back({"communication log", text, "comms_logger.enabled: true"});
}

}  // namespace ds::engine
