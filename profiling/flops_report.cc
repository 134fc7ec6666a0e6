#include "profiling/flops_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "core/text.h"

namespace ds::profiling {
namespace {

constexpr size_t kLabelWidth = 64;

class Lines {
 public:
  void line(const std::string& text) { text_ += text + '\n'; }
  void value(const std::string& label, const std::string& value) {
    const size_t spaces = label.size() < kLabelWidth ? kLabelWidth - label.size() : 1;
    line(label + std::string(spaces, ' ') + value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string rate(double amount, double seconds, const char* unit) {
  return seconds > 0 ? with_prefix(amount / seconds, unit) : std::string("not measured");
}

std::string share(double part, double whole) { return whole > 0 ? cat(fixed(100 * part / whole, 2), "%") : "0%"; }

void add_counts(const FlopsProfile& profile, Lines& lines) {
  const ModuleFlops& total = profile.modules.front();
  lines.value("params per GPU:", with_prefix(static_cast<double>(total.parameters)));
  lines.value("fwd MACs per GPU:", with_prefix(static_cast<double>(total.macs), "MACs"));
  lines.value("fwd flops per GPU:", with_prefix(static_cast<double>(total.flops)));
  lines.value("bwd MACs per GPU:", with_prefix(static_cast<double>(total.backward_macs), "MACs"));
  lines.value("bwd flops per GPU:", with_prefix(static_cast<double>(total.backward_flops)));
  lines.value("recomputed flops per GPU:", with_prefix(static_cast<double>(total.recomputed_flops)));
}

void add_step(const StepFlops& s, const ModuleFlops& total, Lines& lines) {
  const auto flops = static_cast<double>(total.flops);
  const auto backward = static_cast<double>(total.backward_flops + total.recomputed_flops);
  lines.value("params of model:", with_prefix(static_cast<double>(s.model_parameters)));
  lines.value("fwd flops of model = fwd flops of all its parts:", with_prefix(static_cast<double>(s.model_flops)));
  if (s.forward_seconds) {
    lines.value("fwd latency:", duration(*s.forward_seconds));
    lines.value("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", rate(flops, *s.forward_seconds, "FLOPS"));
    lines.value("bwd latency:", duration(s.backward_seconds));
    lines.value("bwd FLOPS per GPU = (bwd + recomputed flops) / bwd latency:",
                rate(backward, s.backward_seconds, "FLOPS"));
    lines.value("bwd FLOPS as DeepSpeed assumes them, (2 + recompute factor) fwd:",
                rate((2 + s.recompute_fwd_factor) * flops, s.backward_seconds, "FLOPS"));
  }
  const double both = s.forward_seconds.value_or(0) + s.backward_seconds;
  if (!s.forward_seconds) lines.value("fwd and bwd latency of the schedule:", duration(both));
  lines.value("fwd+bwd FLOPS per GPU:", rate(flops + backward, both, "FLOPS"));
  lines.value("step latency:", duration(s.step_seconds));
  lines.value("iter latency:", duration(s.iteration_seconds));
  lines.value("FLOPS per GPU = all flops of a step / iter latency:",
              rate((flops + backward) * static_cast<double>(s.micro_batches), s.iteration_seconds, "FLOPS"));
  const auto samples = static_cast<double>(s.batch_size * s.micro_batches * s.data_parallel_size);
  lines.value("samples/second:", s.iteration_seconds > 0 ? fixed(samples / s.iteration_seconds, 2) : "not measured");
}

void add_summary(const StepFlops* step, const FlopsProfile& profile, Lines& lines) {
  lines.line(step != nullptr ? cat("flops profile of step ", step->step, ", of one micro-batch on this rank")
                             : "flops profile");
  lines.line(
      "params: parameters, MACs: multiply-accumulates of products, flops: floating-point operations, FLOPS: flops in "
      "a");
  lines.line(
      "second, fwd: forward, bwd: backward as it ran, step: the update, iter: a whole step with all its micro-batches");
  lines.line("");
  if (step != nullptr) {
    lines.value("world size:", cat(step->world_size));
    lines.value("data parallel size:", cat(step->data_parallel_size));
    lines.value("model parallel size:", cat(step->model_parallel_size));
    lines.value("batch size per GPU:", cat(step->batch_size));
  }
  add_counts(profile, lines);
  if (step != nullptr) add_step(*step, profile.modules.front(), lines);
  for (const std::string& name : profile.unknown_operators) {
    lines.line(cat("not counted, for there is no rule: ", name));
  }
}

using Amount = double (*)(const ModuleFlops& row);
struct Ranking {
  const char* label;
  Amount amount;
  bool time;
};
constexpr std::array<Ranking, 3> kRankings = {
    Ranking{"params", [](const ModuleFlops& row) { return static_cast<double>(row.parameters); }, false},
    Ranking{"MACs", [](const ModuleFlops& row) { return static_cast<double>(row.macs); }, false},
    Ranking{"fwd latency", [](const ModuleFlops& row) { return row.seconds; }, true}};

// Adds, for each depth, the types of modules with the most, all of a type together.
void add_ranking(const std::vector<ModuleFlops>& rows, const FlopsReportOptions& options, Lines& lines) {
  int deepest = 0;
  for (const ModuleFlops& row : rows) deepest = std::max(deepest, row.depth);
  const int last =
      options.modules.module_depth < 0 ? deepest : std::min(deepest, static_cast<int>(options.modules.module_depth));
  lines.line("");
  lines.line(cat("the ", options.modules.top_modules, " largest types of modules at each depth"));
  for (int depth = 0; depth <= last; ++depth) {
    lines.line(cat("depth ", depth, ":"));
    for (const Ranking& ranking : kRankings) {
      if (ranking.time && !options.host_times) continue;
      std::vector<std::pair<std::string, double>> types;
      for (const ModuleFlops& row : rows) {
        if (row.depth != depth) continue;
        auto found = std::find_if(types.begin(), types.end(), [&](const auto& type) { return type.first == row.type; });
        if (found == types.end()) found = types.insert(types.end(), {row.type, 0.0});
        found->second += ranking.amount(row);
      }
      std::stable_sort(types.begin(), types.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
      std::string text;
      for (size_t i = 0; i < types.size() && i < static_cast<size_t>(options.modules.top_modules); ++i) {
        text += cat(i == 0 ? "" : ", ", types[i].first, " ",
                    ranking.time ? duration(types[i].second) : with_prefix(types[i].second));
      }
      lines.line(cat("    ", ranking.label, ": ", text));
    }
  }
}

void add_tree(const std::vector<ModuleFlops>& rows, const FlopsReportOptions& options, Lines& lines) {
  const ModuleFlops& all = rows.front();
  lines.line("");
  lines.line(
      "each module with all that is in it: params, share, fwd MACs, share, bwd flops, fwd latency, share, fwd FLOPS");
  for (const ModuleFlops& row : rows) {
    const std::string name = row.name.empty() ? "model" : row.name.substr(row.name.rfind('.') + 1);
    std::string text = cat(std::string(static_cast<size_t>(row.depth) * 2, ' '), name, " (", row.type,
                           "): ", with_prefix(static_cast<double>(row.parameters)), ", ",
                           share(static_cast<double>(row.parameters), static_cast<double>(all.parameters)), ", ",
                           with_prefix(static_cast<double>(row.macs), "MACs"), ", ",
                           share(static_cast<double>(row.macs), static_cast<double>(all.macs)), ", ",
                           with_prefix(static_cast<double>(row.backward_flops)));
    if (options.host_times) {
      text += cat(", ", duration(row.seconds), ", ", share(row.seconds, all.seconds), ", ",
                  rate(static_cast<double>(row.flops), row.seconds, "FLOPS"));
    }
    lines.line(text);
  }
  if (!options.host_times) lines.line("latencies of modules are not measured on a device, which runs behind the host");
}

}  // namespace

void add_part(ModuleFlops& module, const ModuleFlops& part) {
  module.parameters += part.parameters;
  module.macs += part.macs;
  module.flops += part.flops;
  module.backward_macs += part.backward_macs;
  module.backward_flops += part.backward_flops;
  module.recomputed_flops += part.recomputed_flops;
  module.seconds += part.seconds;
}

void divide_by(ModuleFlops& module, int64_t times) {
  for (int64_t* count :
       {&module.macs, &module.flops, &module.backward_macs, &module.backward_flops, &module.recomputed_flops}) {
    *count /= times;
  }
  module.seconds /= static_cast<double>(times);
}

std::string with_prefix(double value, const std::string& unit) {
  constexpr std::array<const char*, 6> kPrefixes = {"", "K", "M", "G", "T", "P"};
  size_t prefix = 0;
  while (std::abs(value) >= 1000 && prefix + 1 < kPrefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  const bool whole = prefix == 0 && value == std::floor(value);
  const std::string unit_text = kPrefixes[prefix] + unit;
  return cat(fixed(value, whole ? 0 : 2), unit_text.empty() ? "" : " ", unit_text);
}

std::string duration(double seconds) {
  if (seconds >= 1) return cat(fixed(seconds, 2), " s");
  return seconds >= 1e-3 ? cat(fixed(seconds * 1e3, 2), " ms") : cat(fixed(seconds * 1e6, 2), " us");
}

std::string flops_report(const StepFlops* step, const FlopsProfile& profile, const FlopsReportOptions& options) {
  Lines lines;
  add_summary(step, profile, lines);
  if (options.modules.top_modules > 0) add_ranking(profile.modules, options, lines);
  if (options.modules.detailed) add_tree(profile.modules, options, lines);
  return lines.take();
}

}  // namespace ds::profiling
