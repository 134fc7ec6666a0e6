#include "tools/forecast.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "config/plan/device_overhead.h"
#include "core/check.h"
#include "core/shown_text.h"

namespace ds::tool {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const PipeRank& rank, const Forecast& forecast) {
  const engine::Topology& topology = forecast.simulation.plan.topology;
  const int64_t last = rank.first_rank + topology.dp * topology.tensor - 1;
  return {
      {"ranks", {rank.first_rank, last}},
      {"stages", rank.stages},
      {"layers", rank.layers},
      {"parameters", rank.parameters},
      {"busy_seconds", rank.busy_seconds},
      {"bytes",
       {{"model_state", rank.state_bytes},
        {"gathered", rank.gathered_bytes},
        {"activations", rank.activation_bytes},
        {"messages", rank.message_bytes},
        {"total", rank.memory()},
        {"host", rank.host_bytes}}},
      {"fits", forecast.limit ? ordered_json(forecast.fits(rank)) : ordered_json()},
      {"sent_per_step",
       {{"pipeline", rank.pipeline_sent}, {"data_parallel", rank.data_parallel_sent}, {"tensor", rank.tensor_sent}}}};
}

using Table = std::vector<std::vector<std::string>>;

// The last column is as wide as it is.
void print_table(const Table& table, std::ostream& out) {
  std::vector<size_t> widths;
  for (const std::vector<std::string>& row : table) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c + 1 < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const std::vector<std::string>& row : table) {
    out << ' ';
    for (size_t c = 0; c < row.size(); ++c) {
      out << ' ' << row[c];
      if (c + 1 < row.size()) out << std::string(widths[c] - row[c].size() + 1, ' ');
    }
    out << '\n';
  }
}

std::string gibibytes(int64_t bytes) { return fixed(static_cast<double>(bytes) / kGibibyte, 2); }

// A number of bytes in the unit that suits its size: "3.2 MiB".
std::string bytes_text(int64_t bytes) {
  auto value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return cat(fixed(value, unit[0] == 'B' ? 0 : 1), ' ', unit);
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? cat(fixed(seconds * 1e3, 3), " ms") : cat(fixed(seconds, 3), " s");
}

std::string count_text(int64_t count, const char* one, const char* several) {
  return cat(count, ' ', count == 1 ? one : several);
}

std::string ranks_text(const PipeRank& rank, const Forecast& forecast) {
  const int64_t ranks = forecast.simulation.plan.topology.dp * forecast.simulation.plan.topology.tensor;
  return ranks == 1 ? cat(rank.first_rank) : cat(rank.first_rank, "-", rank.first_rank + ranks - 1);
}

bool tensor_inside_node(const Forecast& forecast) {
  return !first_crossing(forecast.machine, forecast.simulation.plan.topology.tensor);
}

std::string tensor_text(const Forecast& forecast) {
  const int64_t tensor = forecast.simulation.plan.topology.tensor;
  if (tensor == 1) return "";
  return cat(" x tensor ", tensor, tensor_inside_node(forecast) ? " (each inside a node)" : " (across nodes)");
}

// Returns the warnings of the config, and of the plan of the rank with most parameters.
std::vector<std::string> warnings_of(const Forecast& forecast) {
  std::vector<std::string> warnings = forecast.config.warnings;
  const std::vector<std::string>& of_plan = forecast.simulation.plan.warnings;
  warnings.insert(warnings.end(), of_plan.begin(), of_plan.end());
  return warnings;
}

// Returns the plan's words on the order of the axes; empty: there is one axis.
std::string mesh_text(const Forecast& forecast) {
  for (const engine::PlanRow& row : forecast.simulation.plan.rows) {
    if (row.what == "mesh") return row.choice;
  }
  return "";
}

Table head_of(const Forecast& forecast) {
  const Simulation& simulation = forecast.simulation;
  const engine::config::DsConfig& config = forecast.config;
  const engine::Topology& topology = simulation.plan.topology;
  const std::string chunks = simulation.chunks > 1 ? cat(" x ", simulation.chunks, " stages") : "";
  Table table = {
      {"ranks", cat(topology.world_size, " = pipeline ", topology.pipe, chunks, " x data parallel ", topology.dp,
                    tensor_text(forecast), ", on ", count_text(forecast.machine.nodes(), "node", "nodes"))},
      {"batch", cat(topology.pipe > 1 ? cat(simulation.schedule, ", ") : "",
                    count_text(config.gradient_accumulation_steps, "micro-batch", "micro-batches"), " of ",
                    count_text(config.train_micro_batch_size_per_gpu, "sample", "samples"), ", ",
                    config.train_batch_size, " in a step")},
      {"model",
       cat(forecast.parameters, " parameters in ", count_text(static_cast<int64_t>(forecast.layers), "layer", "layers"),
           ", ZeRO stage ", config.zero_optimization.stage, ", ", name_of(simulation.plan.model_dtype))}};
  const std::string mesh = mesh_text(forecast);
  if (!mesh.empty()) table.insert(table.begin() + 1, {"mesh", mesh});
  return table;
}

Table step_of(const Forecast& forecast) {
  const StepSeconds& step = forecast.simulation.step;
  const double total = step.total();
  const auto row = [&](const char* what, double seconds, std::string note) {
    const std::string share = total > 0 ? cat(fixed(100 * seconds / total, 1), " %") : "";
    return std::vector<std::string>{what, seconds_text(seconds), share, std::move(note)};
  };
  std::string rate = cat(fixed(forecast.samples_per_second(), 1), " samples/s");
  if (forecast.tokens_of_sample) {
    rate += cat(", ", fixed(forecast.samples_per_second() * *forecast.tokens_of_sample, 0), " tokens/s");
  }
  return {row("step", total, rate),
          row("compute", step.compute, "of a rank, in the mean"),
          row("bubble", step.bubble, "ranks wait for one another"),
          row("tensor", step.tensor, "sums over ranks that share layers, which computing waits for"),
          row("messages", step.messages, "between stages, beyond what computing hides"),
          row("data parallel", step.data_parallel, "collectives, beyond what computing hides"),
          row("update", step.update, forecast.update_known ? "as given" : "not modelled: --update_ms")};
}

// The largest bytes of any rank, for each axis apart: the rank that sends most along one need not do so along another.
// Beside them, of several nodes, what leaves the node that sends most along the axis.
Table traffic_of(const Forecast& forecast) {
  int64_t pipeline = 0;
  int64_t data = 0;
  int64_t tensor = 0;
  for (const PipeRank& rank : forecast.simulation.pipe_ranks) {
    pipeline = std::max(pipeline, rank.pipeline_sent);
    data = std::max(data, rank.data_parallel_sent);
    tensor = std::max(tensor, rank.tensor_sent);
  }
  const Simulation::AxisBytes& nodes = forecast.simulation.node_sent_along;
  const auto row = [&](const char* what, int64_t of_rank, int64_t of_node) {
    std::vector<std::string> cells = {what, bytes_text(of_rank)};
    if (forecast.machine.nodes() == 1 || of_rank == 0) return cells;
    cells.push_back(of_node == 0 ? "inside nodes" : cat(bytes_text(of_node), " leave a node"));
    return cells;
  };
  return {row("a rank, in its pipeline", pipeline, nodes.pipeline),
          row("a rank, data parallel", data, nodes.data_parallel),
          row("a rank, to those that share its layers", tensor, nodes.tensor),
          {"a node, to other nodes", bytes_text(forecast.simulation.node_sent)}};
}

std::string stages_text(const PipeRank& rank) {
  std::string text;
  for (const int stage : rank.stages) text += cat(text.empty() ? "" : ",", stage);
  return text;
}

// All ranks of a row have as much: those of a tensor axis where parts are even, else the one with the largest.
Table memory_of(const Forecast& forecast, bool all) {
  Table table = {{"ranks", "stage", "state", "gathered", "activations", "messages", "total", "busy", "layers"}};
  const PipeRank& fullest = forecast.simulation.fullest();
  for (const PipeRank& rank : forecast.simulation.pipe_ranks) {
    if (!all && &rank != &fullest) continue;
    const std::string mark = forecast.fits(rank) ? "" : "  does not fit";
    table.push_back({ranks_text(rank, forecast), stages_text(rank), gibibytes(rank.state_bytes),
                     gibibytes(rank.gathered_bytes), gibibytes(rank.activation_bytes), gibibytes(rank.message_bytes),
                     gibibytes(rank.memory()), seconds_text(rank.busy_seconds), rank.layers + mark});
  }
  return table;
}

}  // namespace

double Forecast::samples_per_second() const {
  return static_cast<double>(config.train_batch_size) / simulation.step.total();
}

bool Forecast::fits(const PipeRank& rank) const { return !limit || static_cast<double>(rank.memory()) <= *limit; }

bool Forecast::fits() const {
  return std::all_of(simulation.pipe_ranks.begin(), simulation.pipe_ranks.end(),
                     [&](const PipeRank& rank) { return fits(rank); });
}

ordered_json to_json(const Forecast& forecast, bool per_rank) {
  const Simulation& simulation = forecast.simulation;
  const StepSeconds& step = simulation.step;
  ordered_json json = {{"ok", true},
                       {"source", forecast.config.source},
                       {"ranks", forecast.machine.ranks},
                       {"pipeline", simulation.plan.topology.pipe},
                       {"data_parallel", simulation.plan.topology.dp},
                       {"tensor", simulation.plan.topology.tensor},
                       {"tensor_inside_node", tensor_inside_node(forecast)},
                       {"schedule", simulation.schedule},
                       {"chunks", simulation.chunks},
                       {"micro_batches", forecast.config.gradient_accumulation_steps},
                       {"parameters", forecast.parameters},
                       {"step_seconds",
                        {{"total", step.total()},
                         {"compute", step.compute},
                         {"bubble", step.bubble},
                         {"tensor", step.tensor},
                         {"messages", step.messages},
                         {"data_parallel", step.data_parallel},
                         {"update", forecast.update_known ? ordered_json(step.update) : ordered_json()}}},
                       {"passes", {{"makespan", simulation.makespan}, {"idle", simulation.idle}}},
                       {"samples_per_second", forecast.samples_per_second()},
                       {"tokens_per_second", forecast.tokens_of_sample ? ordered_json(forecast.samples_per_second() *
                                                                                      *forecast.tokens_of_sample)
                                                                       : ordered_json()},
                       {"sent_by_a_node_per_step", simulation.node_sent},
                       {"sent_by_a_node_along",
                        {{"pipeline", simulation.node_sent_along.pipeline},
                         {"data_parallel", simulation.node_sent_along.data_parallel},
                         {"tensor", simulation.node_sent_along.tensor}}},
                       {"warnings", warnings_of(forecast)},
                       {"fullest", to_json(simulation.fullest(), forecast)},
                       {"fits", forecast.limit ? ordered_json(forecast.fits()) : ordered_json()}};
  if (!per_rank) return json;
  json["per_rank"] = ordered_json::array();
  for (const PipeRank& rank : simulation.pipe_ranks) json["per_rank"].push_back(to_json(rank, forecast));
  return json;
}

void print(const Forecast& forecast, bool per_rank, std::ostream& out) {
  const Simulation& simulation = forecast.simulation;
  out << shown_text(forecast.config.source) << ", simulated\n";
  print_table(head_of(forecast), out);
  for (const std::string& warning : warnings_of(forecast)) out << "  warning  " << shown_message(warning) << '\n';
  out << "\nTime of a step\n";
  print_table(step_of(forecast), out);
  out << "\nBytes sent in a step, at most\n";
  print_table(traffic_of(forecast), out);
  out << "\nGiB of a rank at its peak" << (per_rank ? "" : ", the fullest (all: --per_rank)") << '\n';
  print_table(memory_of(forecast, per_rank), out);
  const PipeRank& fullest = simulation.fullest();
  if (fullest.host_bytes > 0) out << "  and " << gibibytes(fullest.host_bytes) << " GiB of host memory\n";
  const engine::DeviceOverhead overhead = engine::predict_device_overhead(simulation.plan);
  out << "  on a GPU " << gibibytes(overhead.total()) << " GiB beside that, for CUDA's context, "
      << overhead.groups + overhead.pairs << " communicators of NCCL and cuBLAS: not in the total\n";
  if (forecast.fits()) return;
  out << "\nMore than " << *forecast.limit / kGibibyte << " GiB is needed by ranks";
  const char* separator = " ";
  for (const PipeRank& rank : simulation.pipe_ranks) {
    if (forecast.fits(rank)) continue;
    out << separator << ranks_text(rank, forecast);
    separator = ", ";
  }
  out << '\n';
}

}  // namespace ds::tool
