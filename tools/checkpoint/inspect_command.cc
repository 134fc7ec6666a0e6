#include "core/json/parse_json.h"
#include "tools/checkpoint/commands.h"

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "tools/checkpoint/text_columns.h"

namespace ds::checkpoint::tool {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct Kind {
  std::string name;
  int64_t tensors = 0;
  int64_t bytes = 0;
};

struct StoredFile {
  std::string name;
  int64_t bytes = 0;
};

int64_t bytes_of(const TensorInfo& info) { return info.numel() * static_cast<int64_t>(c10::elementSize(info.dtype)); }

// By the first folder of their paths; states of the optimizer one by one.
std::vector<Kind> kinds_of(const Source& source) {
  std::vector<Kind> kinds;
  for (const auto& [path, info] : source.tensors()) {
    const bool of_optimizer = path.starts_with("optimizer/");
    const std::string name = path.substr(0, path.find('/', of_optimizer ? path.find('/') + 1 : 0));
    if (kinds.empty() || kinds.back().name != name) kinds.push_back({name});  // paths are sorted
    ++kinds.back().tensors;
    kinds.back().bytes += bytes_of(info);
  }
  return kinds;
}

std::vector<StoredFile> files_of(const std::string& folder) {
  if (!fs::is_directory(folder)) {
    return {{fs::path(folder).filename().string(), static_cast<int64_t>(fs::file_size(folder))}};
  }
  std::vector<StoredFile> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    files.push_back({entry.path().filename().string(), static_cast<int64_t>(entry.file_size())});
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return files;
}

std::string shape_of(const TensorInfo& info) {
  std::string text = "[";
  for (const int64_t size : info.sizes) text += cat(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

ordered_json report_of(const Source& source, const Location& location, const InspectOptions& options) {
  // Through text: the state's own JSON is sorted, this one is not.
  ordered_json report = {{"path", location.folder}, {"format", name_of(location.format)}};
  if (!location.latest.empty()) report["latest"] = location.latest;
  if (!location.tags.empty()) report["tags"] = location.tags;
  report["state"] = parse_json<ordered_json>(to_json(source.state()).dump());
  report["tensors"] = source.tensors().size();
  report["kinds"] = ordered_json::array();
  for (const Kind& kind : kinds_of(source)) {
    report["kinds"].push_back({{"name", kind.name}, {"tensors", kind.tensors}, {"bytes", kind.bytes}});
  }
  report["files"] = ordered_json::array();
  for (const StoredFile& file : files_of(location.folder)) {
    report["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  report["aliases"] = source.aliases();
  if (!options.tensors) return report;
  report["tensor_table"] = ordered_json::array();
  for (const auto& [path, info] : source.tensors()) {
    report["tensor_table"].push_back({{"path", path},
                                      {"dtype", c10::toString(info.dtype)},
                                      {"shape", info.sizes},
                                      {"bytes", bytes_of(info)},
                                      {"frozen", info.frozen}});
  }
  return report;
}

std::string number(double value) { return nlohmann::json(value).dump(); }

std::vector<std::vector<std::string>> state_rows(const TrainingState& state) {
  std::vector<std::vector<std::string>> rows = {{"step", cat(state.global_steps)},
                                                {"samples", cat(state.global_samples)},
                                                {"micro-steps of a rank", cat(state.micro_steps)},
                                                {"skipped steps", cat(state.skipped_steps)},
                                                {"world size", cat(state.world_size)},
                                                {"ZeRO stage", cat(state.zero_stage)},
                                                {"precision", state.precision.empty() ? "unknown" : state.precision}};
  if (state.pipeline_stages > 1) rows.push_back({"pipeline stages", cat(state.pipeline_stages)});
  if (state.tensor_ranks > 1) rows.push_back({"tensor ranks", cat(state.tensor_ranks)});
  if (state.optimizer) {
    const OptimizerState& optimizer = *state.optimizer;
    rows.push_back({"optimizer", cat(optimizer.type, ", ", optimizer.step_count, " updates")});
    for (size_t i = 0; i < optimizer.groups.size(); ++i) {
      const optimizers::GroupOptions& group = optimizer.groups[i];
      rows.push_back({cat("  group ", i), cat("lr ", number(group.lr), ", weight decay ", number(group.weight_decay),
                                              ", betas ", number(group.beta1), " ", number(group.beta2), ", momentum ",
                                              number(group.momentum), ", eps ", number(group.eps))});
    }
  } else {
    rows.push_back({"optimizer", "none: weights only"});
  }
  if (state.loss_scaler) rows.push_back({"loss scale", number(state.loss_scaler->scale)});
  if (state.ema_updates) rows.push_back({"moving average of weights", cat(*state.ema_updates, " updates")});
  if (state.lr_iteration) rows.push_back({"lr schedule", cat("iteration ", *state.lr_iteration)});
  if (state.plateau) {
    const optimizers::PlateauState& plateau = *state.plateau;
    rows.push_back(
        {"ReduceLROnPlateau", cat(plateau.values, " values, best ", plateau.best ? number(*plateau.best) : "none", ", ",
                                  plateau.bad_values, " since then, cooldown ", plateau.cooldown)});
  }
  if (state.data) {
    rows.push_back({"data", cat("epoch ", state.data->epoch, ", next sample ", state.data->next_sample, ", seed ",
                                state.data->seed)});
  }
  return rows;
}

void print_report(const Source& source, const Location& location, const InspectOptions& options, std::ostream& out) {
  out << location.folder << " (" << name_of(location.format) << ")\n";
  if (!location.tags.empty()) {
    out << "tags:";
    for (const std::string& tag : location.tags) out << ' ' << tag << (tag == location.latest ? " (latest)" : "");
    out << '\n';
  }
  out << "\nTraining\n";
  print_columns(state_rows(source.state()), out);
  out << "\nTensors\n";
  std::vector<std::vector<std::string>> rows;
  int64_t bytes = 0;
  for (const Kind& kind : kinds_of(source)) {
    rows.push_back({kind.name, cat(kind.tensors), shown_bytes(kind.bytes)});
    bytes += kind.bytes;
  }
  rows.push_back({"total", cat(source.tensors().size()), shown_bytes(bytes)});
  print_columns(rows, out);
  out << "\nFiles\n";
  rows.clear();
  for (const StoredFile& file : files_of(location.folder)) rows.push_back({file.name, shown_bytes(file.bytes)});
  print_columns(rows, out);
  if (!source.aliases().empty()) {
    out << "\nTied parameters\n";
    rows.clear();
    for (const auto& [name, stored] : source.aliases()) rows.push_back({name, cat("is ", stored)});
    print_columns(rows, out);
  }
  if (!source.state().client_state.empty()) {
    out << "\nThe program's own state\n  " << source.state().client_state.dump() << '\n';
  }
  if (!options.tensors) return;
  out << "\nTensor table\n";
  rows.clear();
  for (const auto& [path, info] : source.tensors()) {
    rows.push_back({path, c10::toString(info.dtype), shape_of(info), info.frozen ? "frozen" : ""});
  }
  print_columns(rows, out);
}

}  // namespace

void inspect(const Source& source, const Location& location, const InspectOptions& options, std::ostream& out) {
  if (options.json) {
    out << report_of(source, location, options).dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
  } else {
    print_report(source, location, options, out);
  }
}

}  // namespace ds::checkpoint::tool
