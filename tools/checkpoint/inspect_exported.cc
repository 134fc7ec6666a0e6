// ds-tool checkpoint inspect model.pt2: a model that Python's torch.export has written.
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/shown_text.h"
#include "dsengine/exported_model.h"
#include "exported/archive.h"
#include "exported/graph_reader.h"
#include "exported/number_functions.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/text_columns.h"

namespace ds::checkpoint::tool {
namespace {

using exported::StoredTensors;
using nlohmann::ordered_json;

constexpr std::string_view kOperators = "torch.ops.", kHigherOrder = "higher_order.";

// Counts the calls of each operator, in the graph and in those that its nodes have as arguments.
void count_operators(const nlohmann::json& graph, std::map<std::string, int64_t>& counts) {
  for (const nlohmann::json& node : graph.at("nodes")) {
    const auto target = node.at("target").get<std::string>();
    ++counts[target.starts_with(kOperators) ? target.substr(kOperators.size()) : target];
    for (const nlohmann::json& input : node.at("inputs")) {
      const nlohmann::json& argument = input.at("arg");
      if (argument.contains("as_graph")) count_operators(argument.at("as_graph").at("graph"), counts);
    }
  }
}

// Whether LibTorch, or a library in this process, has an operator "aten.linear.default". Functions of numbers and
// operators of higher order are the loader's own.
bool is_registered(const std::string& name) {
  if (name.find('.') == name.rfind('.') || exported::is_number_function(name) || name.starts_with(kHigherOrder)) {
    return true;
  }
  return exported::registered_operator(name).has_value();
}

std::string words_of(const ExportedSize& size) {
  if (size.symbol.empty()) return cat(size.least);
  if (size.most == INT64_MAX) return cat(size.symbol, ": ", size.least, " or more");
  return cat(size.symbol, ": ", size.least, " to ", size.most);
}

ordered_json inputs_of(const ExportedModule& model) {
  ordered_json inputs = ordered_json::array();
  for (const ExportedInput& input : model.inputs()) {
    ordered_json sizes = ordered_json::array();
    for (const ExportedSize& size : input.sizes) sizes.push_back(words_of(size));
    inputs.push_back({{"name", input.name}, {"dtype", input.is_tensor ? c10::toString(input.dtype) : "baked"}});
    if (input.is_tensor) inputs.back()["sizes"] = sizes;
  }
  return inputs;
}

ordered_json tensor_kinds(const StoredTensors& tensors) {
  std::map<std::string, std::pair<int64_t, int64_t>> kinds;  // tensors, bytes
  for (const auto& [name, tensor] : tensors) {
    auto& [count, bytes] = kinds[cat(tensor.is_parameter ? "parameters" : "buffers", ", ", tensor.dtype,
                                     tensor.is_parameter && !tensor.requires_grad ? ", frozen" : "")];
    ++count;
    bytes += tensor.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  }
  ordered_json result = ordered_json::array();
  for (const auto& [name, kind] : kinds) {
    result.push_back({{"name", name}, {"tensors", kind.first}, {"bytes", kind.second}});
  }
  return result;
}

ordered_json program_report(const exported::Archive& archive, const std::string& name, const InspectOptions& options) {
  const nlohmann::json program = archive.program(name);
  const StoredTensors tensors = archive.weights(name);
  std::map<std::string, int64_t> counts;
  archive.reading(name, [&] { count_operators(program.at("graph_module").at("graph"), counts); });
  ordered_json report = {{"program", name},
                         {"torch", program.value("torch_version", std::string())},
                         {"schema", cat(program.at("schema_version").at("major").get<int64_t>(), ".",
                                        program.at("schema_version").value("minor", int64_t{0}))}};
  try {
    const auto model = load_exported(archive.path(), {.program = name, .meta = true});
    report["inputs"] = inputs_of(*model);
    report["outputs"] = model->outputs();
  } catch (const IoError& error) {
    report["refused"] = error.what();
  }
  report["tensors"] = tensors.size();
  report["kinds"] = tensor_kinds(tensors);
  report["tied"] = exported::tied_names(tensors);
  report["operators"] = ordered_json::array();
  for (const auto& [op, calls] : counts) {
    report["operators"].push_back({{"name", op}, {"calls", calls}, {"registered", is_registered(op)}});
  }
  if (!options.tensors) return report;
  report["tensor_table"] = ordered_json::array();
  for (const auto& [key, tensor] : tensors) {
    report["tensor_table"].push_back({{"name", key}, {"dtype", c10::toString(tensor.dtype)}, {"shape", tensor.sizes}});
  }
  return report;
}

using Rows = std::vector<std::vector<std::string>>;

void print_inputs(const ordered_json& report, std::ostream& out) {
  if (report.contains("refused")) {
    out << "\nIt cannot be trained with this LibTorch\n  " << report.at("refused").get<std::string>() << '\n';
    return;
  }
  Rows rows;
  for (const ordered_json& input : report.at("inputs")) {
    std::string sizes;
    for (const ordered_json& size : input.value("sizes", ordered_json::array())) {
      sizes += cat(sizes.empty() ? "" : ", ", size.get<std::string>());
    }
    rows.push_back({input.at("name").get<std::string>(), input.at("dtype").get<std::string>(),
                    input.contains("sizes") ? cat("[", sizes, "]") : ""});
  }
  out << "\nInputs\n";
  print_columns(rows, out);
  rows.clear();
  for (const ordered_json& output : report.at("outputs")) rows.push_back({output.get<std::string>()});
  out << "\nOutputs\n";
  print_columns(rows, out);
}

void print_program(const ordered_json& report, std::ostream& out) {
  out << "\nProgram \"" << report.at("program").get<std::string>() << "\", exported by torch "
      << shown_text(report.at("torch").get<std::string>()) << ", schema " << report.at("schema").get<std::string>()
      << '\n';
  print_inputs(report, out);
  Rows rows;
  for (const ordered_json& kind : report.at("kinds")) {
    rows.push_back({kind.at("name").get<std::string>(), cat(kind.at("tensors").get<int64_t>()),
                    shown_bytes(kind.at("bytes").get<int64_t>())});
  }
  out << "\nTensors\n";
  print_columns(rows, out);
  rows.clear();
  for (const auto& [name, first] : report.at("tied").items()) {
    rows.push_back({shown_text(name), cat("is ", shown_text(first.get<std::string>()))});
  }
  if (!rows.empty()) out << "\nTied parameters\n";
  print_columns(rows, out);
  rows.clear();
  for (const ordered_json& op : report.at("operators")) {
    rows.push_back({shown_text(op.at("name").get<std::string>()), cat(op.at("calls").get<int64_t>()),
                    op.at("registered").get<bool>() ? "" : "not in this LibTorch"});
  }
  out << "\nOperators\n";
  print_columns(rows, out);
  if (!report.contains("tensor_table")) return;
  rows.clear();
  for (const ordered_json& tensor : report.at("tensor_table")) {
    rows.push_back({shown_text(tensor.at("name").get<std::string>()), tensor.at("dtype").get<std::string>(),
                    tensor.at("shape").dump()});
  }
  out << "\nTensor table\n";
  print_columns(rows, out);
}

}  // namespace

void inspect_exported(const std::string& path, const InspectOptions& options, std::ostream& out) {
  const exported::Archive archive(path);
  ordered_json report = {{"path", path}, {"format", "exported model"}, {"programs", ordered_json::array()}};
  for (const std::string& name : archive.programs()) {
    report["programs"].push_back(program_report(archive, name, options));
  }
  if (options.json) {
    out << report.dump(2, ' ', false, ordered_json::error_handler_t::replace) << '\n';
    return;
  }
  out << path << " (exported model)\n";
  for (const ordered_json& program : report.at("programs")) print_program(program, out);
}

}  // namespace ds::checkpoint::tool
