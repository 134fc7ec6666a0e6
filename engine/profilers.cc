// Gives programs the measurements of an engine's comms_logger and flops_profiler.
#include "dsengine/profiling.h"

#include "core/check.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

CommsReport& report_of(Engine& engine, const char* call) {
  Engine::Impl& impl = EngineAccess::impl_of(engine);
  require(impl.comms.has_value(), call,
          ": expected a ds_config with \"comms_logger\": {\"enabled\": true}, found none; ",
          "operations are timed from initialize on");
  return *impl.comms;
}

}  // namespace

std::vector<CommsStatistics> comms_statistics(Engine& engine) {
  constexpr double kMilliseconds = 1e3;
  std::vector<CommsStatistics> all;
  for (const profiling::CommsRecord& record : report_of(engine, "comms_statistics").log().records(/*waits=*/true)) {
    const profiling::Bandwidth bandwidth = profiling::bandwidth_of(record);
    all.push_back({.operation = record.operation,
                   .group = record.group,
                   .ranks = record.ranks,
                   .message_bytes = record.bytes,
                   .count = record.count,
                   .total_ms = record.seconds * kMilliseconds,
                   .average_ms = record.average_seconds() * kMilliseconds,
                   .algbw_gbps = bandwidth.algorithm,
                   .busbw_gbps = bandwidth.bus});
  }
  return all;
}

std::string log_summary(Engine& engine, bool show_straggler) {
  return report_of(engine, "log_summary").summary(EngineAccess::impl_of(engine).state.ranks, show_straggler);
}

std::optional<profiling::FlopsProfile> flops_profile(Engine& engine) {
  const Reporter& reporter = *EngineAccess::impl_of(engine).reporter;
  require(reporter.flops() != nullptr,
          "flops_profile: expected a ds_config with \"flops_profiler\": {\"enabled\": true}, found none; "
          "profiling::profile_flops counts without an engine");
  return reporter.flops()->profile();
}

}  // namespace ds::engine
