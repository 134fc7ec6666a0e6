#include "config/compression_rules.h"

#include <algorithm>
#include <string>

#include "config/config_source.h"
#include "config/describe.h"
#include "core/check.h"
#include "core/json/json_fields.h"

namespace ds::engine::config {

using model_compression::AddProblem;
using model_compression::Method;
using model_compression::Rule;

std::vector<Rule> compression_rules(const CompressionTrainingSection& section, const AddProblem& add) {
  std::vector<Rule> result;
  const auto read = [&](Method method, const CompressionMethodSection& of) {
    const auto rules = model_compression::read_method(method, of.shared_parameters, of.different_groups, add);
    result.insert(result.end(), rules.begin(), rules.end());
  };
  read(Method::kWeightQuantization, section.weight_quantization);
  read(Method::kActivationQuantization, section.activation_quantization);
  read(Method::kSparsePruning, section.sparse_pruning);
  read(Method::kRowPruning, section.row_pruning);
  read(Method::kHeadPruning, section.head_pruning);
  read(Method::kChannelPruning, section.channel_pruning);
  return result;
}

std::vector<Rule> compression_rules(const CompressionTrainingSection& section) {
  return compression_rules(section, [](const std::string&, const std::string&, bool) {});
}

CompressionTraining read_compression_training(const ConfigSource& source) {
  const HjsonDocument document = ConfigReader::read(source);
  require<ConfigError>(document.root.is_object(), source.name(), ": expected an object {...}, found ",
                       lazy([&] { return shown(document.root); }));
  JsonProblems problems(document);
  const JsonReading reading{.document = document, .problems = problems, .auto_value = {}, .meaning = {}, .on_auto = {}};
  JsonFields json(reading, "", document.root, true);
  CompressionTraining result;
  DsConfig defaults;
  json.section("compression_training", result.section, describe, UnknownKeys::kWarn);
  json.field("seed", defaults.seed);
  problems.throw_errors(source.name());
  result.seed = static_cast<uint64_t>(defaults.seed);
  return result;
}

}  // namespace ds::engine::config
