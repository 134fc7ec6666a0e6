#include "engine/report/run_rates.h"

#include <c10/core/CachingDeviceAllocator.h>

#include "core/log.h"
#include "core/text.h"
#include "model/state/part_options.h"
#include "profiling/peak_rate.h"

namespace ds::engine {
namespace {

constexpr double kTera = 1e12;

double peak_of_device(const config::MetricsSection& section, const ModelState& model) {
  if (section.peak_tflops) return *section.peak_tflops * kTera;
  const config::DType dtype = model.plan.autocast.value_or(model.plan.model_dtype);
  const double peak = profiling::measured_peak(model.ranks.device, scalar_type(dtype));
  log::info("metrics.mfu: products of matrices in ", scalar_type(dtype), " run at ", fixed(peak / kTera, 3),
            " TFLOPS on ", model.ranks.device.str(), "; the use of its arithmetic is told as a part of that. Set ",
            "metrics.peak_tflops for another peak");
  return peak;
}

}  // namespace

RunRates::RunRates(const config::DsConfig& config, const ModelState& model) : section_(config.metrics), model_(model) {
  if (section_.mfu) peak_ = peak_of_device(section_, model) * static_cast<double>(model.ranks.world->size());
}

void RunRates::add_to(std::vector<profiling::Event>& events, const Step& step, int64_t place) {
  const auto add = [&](const char* name, double value) {
    events.push_back({.name = cat("Train/Samples/", name), .value = value, .step = place});
  };
  add("resident_bytes", static_cast<double>(profiling::resident_bytes()));
  const c10::Device device = model_.ranks.device;
  if (!device.is_cpu()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    add("device_peak_bytes", static_cast<double>(stats.allocated_bytes[kAll].peak));
  }
  if (++steps_ <= profiling::ThroughputMeter::kSkippedSteps || step.seconds <= 0) return;
  const double samples = static_cast<double>(step.samples) / step.seconds;
  add("samples_per_second", samples);
  const double tokens = section_.tokens_per_sample ? samples * *section_.tokens_per_sample : step.tokens / step.seconds;
  if (tokens > 0) add("tokens_per_second", tokens);
  if (peak_ <= 0) return;
  if (section_.flops_per_sample) {
    add("mfu", samples * *section_.flops_per_sample / peak_);
    if (section_.causal_flops_per_sample) add("mfu_causal", samples * *section_.causal_flops_per_sample / peak_);
  } else if (step.of_sample != nullptr) {
    add("mfu", samples * step.of_sample->full / peak_);
    add("mfu_causal", samples * step.of_sample->causal / peak_);
  }
}

}  // namespace ds::engine
