// Gives programs the measurements of an engine's comms_logger and flops_profiler, and takes their values for monitors.
#include "dsengine/profiling.h"

#include <utility>

#include "core/check.h"
#include "dsengine/monitor.h"
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

void Engine::log(const std::string& name, double value, const LogOptions& options) {
  impl_->named([&] {
    impl_->order.require(Call::kLog);
    if (LoggedValues* const logged = impl_->reporter->logged()) logged->add(name, value, options);
  });
}

void Engine::log(const std::string& name, const at::Tensor& value, const LogOptions& options) {
  impl_->named([&] {
    impl_->order.require(Call::kLog);
    if (LoggedValues* const logged = impl_->reporter->logged()) logged->add(name, value, options);
  });
}

void end_epoch(Engine& engine) {
  Engine::Impl& impl = EngineAccess::impl_of(engine);
  impl.named([&] {
    impl.order.require(Call::kEndEpoch);
    impl.reporter->write_logged(impl.progress.global_steps, impl.progress.global_samples);
  });
}

void add_monitor(Engine& engine, std::unique_ptr<profiling::Monitor> monitor) {
  Engine::Impl& impl = EngineAccess::impl_of(engine);
  impl.named([&] {
    impl.order.require(Call::kAddMonitor);
    require(monitor != nullptr || impl.state.ranks.world->rank() != 0,
            "add_monitor(): expected a monitor on rank 0, found null");
    impl.reporter->add_monitor(std::move(monitor));
  });
}

}  // namespace ds::engine
