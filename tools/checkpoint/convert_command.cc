#include "core/json/parse_json.h"
#include "tools/checkpoint/commands.h"

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <utility>

#include "checkpoint/export.h"
#include "checkpoint/source/training_state.h"
#include "core/check.h"
#include "core/files/regular_file.h"
#include "tools/checkpoint/text_columns.h"

namespace ds::checkpoint::tool {
namespace {

std::optional<at::ScalarType> dtype_named(const std::string& name) {
  if (name == "keep") return std::nullopt;
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  require<ConfigError>(name == "fp16", "--dtype: expected keep, fp32, bf16 or fp16, found \"", name, "\"");
  return at::kHalf;
}

std::map<std::string, std::string> names_in(const std::string& file) {
  if (file.empty()) return {};
  constexpr size_t kMostBytes = 256 << 20;
  const FileText names = read_regular_file(file, kMostBytes);
  require<IoError>(names.trouble.empty(), "--rename_map: ", file, ": ", names.trouble);
  try {
    return parse_json<nlohmann::json>(names.text).get<std::map<std::string, std::string>>();
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(cat("--rename_map: ", file, ": expected {\"old\": \"new\"}: ", error.what()));
  }
}

std::pair<std::regex, std::string> pattern_of(const std::string& text) {
  const size_t separator = text.find('=');
  require<ConfigError>(separator != std::string::npos && separator > 0, "--rename: expected OLD=NEW, found \"", text,
                       "\"");
  try {
    return {std::regex(text.substr(0, separator)), text.substr(separator + 1)};
  } catch (const std::regex_error& error) {
    throw ConfigError(cat("--rename: \"", text.substr(0, separator), "\" is no regular expression: ", error.what()));
  }
}

ExportOptions export_options(const ConvertOptions& options) {
  return {.dtype = dtype_named(options.dtype),
          .max_shard_bytes = parsed_bytes(options.max_shard_size),
          .rename = renaming(options.rename, options.rename_map),
          .ema = options.ema,
          .exclude_frozen = options.exclude_frozen,
          .buffers = !options.exclude_buffers,
          .keep_aliases = options.keep_aliases};
}

void convert_to_module(Source& source, const ConvertOptions& options, std::ostream& out) {
  ExportOptions written_as = export_options(options);
  written_as.widen = true;
  std::vector<std::string> modules = source.state().empty_modules.value_or(std::vector<std::string>());
  modules.insert(modules.end(), options.empty_modules.begin(), options.empty_modules.end());
  const ExportedFiles written = export_module(source, options.output, written_as, modules);
  out << options.output << ": " << written.tensors << " tensors, " << shown_bytes(written.bytes)
      << "; load it with torch::load(model, \"" << options.output << "\")\n";
  if (source.state().empty_modules || !options.empty_modules.empty()) return;
  out << source.location() << " does not name modules without tensors (activations, dropout), which torch::load() "
      << "wants: where it says \"No such serialized submodule\", name them by --empty_modules\n";
}

void convert_to_weights(Source& source, const ConvertOptions& options, std::ostream& out) {
  const ExportedFiles written = export_weights(source, options.output, export_options(options));
  out << options.output << ": " << written.tensors << " tensors, " << shown_bytes(written.bytes) << ", in\n";
  for (const std::string& file : written.files) out << "  " << file << '\n';
}

}  // namespace

std::function<std::string(const std::string&)> renaming(const std::vector<std::string>& patterns,
                                                        const std::string& map_file) {
  if (patterns.empty() && map_file.empty()) return {};
  std::vector<std::pair<std::regex, std::string>> rules;
  for (const std::string& text : patterns) rules.push_back(pattern_of(text));
  return [rules, names = names_in(map_file)](const std::string& name) {
    const auto mapped = names.find(name);
    std::string result = mapped == names.end() ? name : mapped->second;
    for (const auto& [pattern, replacement] : rules) result = std::regex_replace(result, pattern, replacement);
    return result;
  };
}

void convert(Source& source, const ConvertOptions& options, std::ostream& out) {
  require<ConfigError>(options.empty_modules.empty() || options.format == "torch",
                       "--empty_modules is for --format torch, ", "found --format ", options.format);
  if (options.format == "huggingface") return convert_to_weights(source, options, out);
  if (options.format == "torch") return convert_to_module(source, options, out);
  const bool changes = options.dtype != "keep" || !options.rename.empty() || !options.rename_map.empty() ||
                       options.exclude_frozen || options.exclude_buffers || options.keep_aliases || options.ema;
  require<ConfigError>(
      !changes, "--format ", options.format, " keeps everything as it is; ",
      "--dtype, --rename, --rename_map, --ema, --exclude_frozen, --exclude_buffers and --keep_aliases are for "
      "--format huggingface and torch");
  const std::filesystem::path given(options.output);  // "a/b/" names b too
  const std::string folder = (given.has_filename() ? given : given.parent_path()).string();
  if (options.format == "universal") {
    export_universal(source, folder);
    out << folder << ": a universal checkpoint; load it with \"checkpoint\": {\"load_universal\": true}\n";
    if (source.state().ema_updates) out << "DeepSpeed has no moving average of the weights: it is left out\n";
    if (source.state().loss_scaler) out << "DeepSpeed does not read a loss scale from it: that starts anew\n";
    return;
  }
  require<ConfigError>(options.format == "dsengine",
                       "--format: expected huggingface, torch, dsengine or universal, found \"", options.format, "\"");
  rewrite(source, folder, options.ranks);
  out << folder << ": a checkpoint of " << options.ranks << (options.ranks == 1 ? " rank\n" : " ranks\n");
}

}  // namespace ds::checkpoint::tool
