#include "exported/program_reader.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/listed.h"
#include "core/shown_text.h"
#include "exported/argument_reader.h"
#include "exported/graph_reader.h"
#include "exported/size_expression.h"
#include "exported/tree_names.h"

namespace ds::exported {
namespace {

using nlohmann::json;

// The smallest and the largest size.
using Range = std::pair<int64_t, int64_t>;

constexpr int64_t kNoLimit = int64_t{1} << 62;  // the writer's infinity is above it

// The surroundings of an argument that no graph is around.
ArgumentContext without_graph() {
  return {
      .slot = [](std::string_view) -> int {
        throw IoError(cat("an input that is a constant names a value", kDamaged));
      },
      .graph = [](const json&) -> size_t { throw IoError(cat("an input that is a constant is a graph", kDamaged)); }};
}

class ProgramReader {
 public:
  ProgramReader(const Archive& archive, const json& from, const ExportedOptions& options, const TensorOfName& tensor)
      : archive_(archive),
        from_(from),
        module_(from.at("graph_module")),
        options_(options),
        tensor_(tensor),
        weights_(archive.weights(options.program)),
        constants_(archive.constants(options.program)),
        program_(std::make_unique<Program>()) {}

  std::unique_ptr<Program> read() {
    program_->path = archive_.path();
    program_->torch_version = from_.value("torch_version", std::string());
    program_->baked_mode = options_.baked_mode;
    const json verifiers = from_.value("verifiers", json::array({"TRAINING"}));
    program_->decomposed = std::find(verifiers.begin(), verifiers.end(), "TRAINING") == verifiers.end();
    read_ranges();
    for (const json& spec : module_.at("signature").at("input_specs")) read_input(spec);
    name_inputs();
    GraphReader graphs(archive_, *program_, device_type_, batch_counts_);
    graphs.read(module_.at("graph"));
    archive_.require_good(program_->main().inputs.size() == program_->sources.size(), "its graph has ",
                          program_->main().inputs.size(), " inputs, its signature ", program_->sources.size(),
                          kDamaged);
    if (!options_.unused_inputs) require_used_inputs(graphs.read_values());
    read_outputs();
    return std::move(program_);
  }

 private:
  void read_ranges() {
    const json ranges = from_.value("range_constraints", json::object());  // items() refers to it
    for (const auto& [symbol, range] : ranges.items()) {
      const auto bound = [&range = range](const char* key, int64_t none) {
        return range.contains(key) && range.at(key).is_number_integer() ? range.at(key).get<int64_t>() : none;
      };
      ranges_[symbol] = {bound("min_val", 0), bound("max_val", INT64_MAX)};
    }
  }

  void add_lifted(LiftedTensor::Kind kind, const std::string& name, const StoredTensors& where) {
    const auto found = where.find(name);
    archive_.require_good(found != where.end(), "the tensor \"", lazy([&] { return shown_text(name); }),
                          "\" of the program is not stored", kDamaged);
    const StoredTensor& stored = found->second;
    const bool is_parameter = kind == LiftedTensor::Kind::kParameter;
    if (is_parameter && c10::isFloatingType(stored.dtype) && !has_dtype_) {
      program_->dtype = stored.dtype;
      has_dtype_ = true;
    }
    if (device_type_.empty() && !stored.device_type.empty()) device_type_ = stored.device_type;
    program_->sources.push_back({.is_lifted = true, .index = program_->lifted.size()});
    lifted_places_.try_emplace(name, program_->lifted.size());
    program_->lifted.push_back({.kind = kind, .name = name, .value = tensor_(kind, name, stored)});
  }

  void read_input(const json& spec) {
    using enum LiftedTensor::Kind;
    if (spec.contains("parameter")) {
      add_lifted(kParameter, spec.at("parameter").at("parameter_name").get<std::string>(), weights_);
    } else if (spec.contains("buffer")) {
      const json& buffer = spec.at("buffer");
      const auto name = buffer.at("buffer_name").get<std::string>();
      const bool persistent = buffer.at("persistent").get<bool>();
      if (name == "num_batches_tracked" || name.ends_with(".num_batches_tracked")) {
        batch_counts_.insert(buffer.at("arg").at("name").get<std::string>());
      }
      add_lifted(persistent ? kBuffer : kNonPersistent, name, persistent ? weights_ : constants_);
    } else if (spec.contains("tensor_constant")) {
      add_lifted(kConstant, spec.at("tensor_constant").at("tensor_constant_name").get<std::string>(), constants_);
    } else if (spec.contains("user_input")) {
      read_user_input(spec.at("user_input").at("arg"));
    } else if (spec.contains("constant_input")) {
      const json& input = spec.at("constant_input");
      add_input({.name = input.at("name").get<std::string>(),
                 .is_tensor = false,
                 .value = read_argument(input.at("value"), without_graph(), nullptr).constant},
                "");
    } else {
      archive_.fail(cat("an input of the kind ", shown_text(spec.dump()),
                        " cannot be trained: script objects and effect tokens have no meaning in C++; write the model "
                        "without them in Python"));
    }
  }

  void add_input(ExportedInput input, const std::string& value_name) {
    program_->sources.push_back({.is_lifted = false, .index = program_->inputs.size()});
    program_->inputs.push_back(std::move(input));
    value_names_.push_back(value_name);
  }

  void read_user_input(const json& argument) {
    archive_.require_good(argument.contains("as_tensor"), "an input of forward is ", shown_text(argument.dump()),
                          ", a dynamic number; make it a tensor in Python, or export it as a constant");
    const auto name = argument.at("as_tensor").at("name").get<std::string>();
    const json& meta = module_.at("graph").at("tensor_values").at(name);
    ExportedInput input{.name = name};
    input.dtype = scalar_type_of(meta.at("dtype").get<int64_t>());
    for (const json& size : meta.at("sizes")) input.sizes.push_back(size_of(size));
    add_input(std::move(input), name);
  }

  ExportedSize size_of(const json& size) const {
    if (size.contains("as_int")) {
      const auto fixed = size.at("as_int").get<int64_t>();
      return {.least = fixed, .most = fixed};
    }
    const SizeExpression expression(size.at("as_expr").at("expr_str").get<std::string>());
    ExportedSize result{.symbol = expression.in_words()};
    if (expression.symbol().empty()) program_->expressions.emplace(result.symbol, expression);
    // Expressions of dynamic dimensions grow with their symbols.
    result.least = expression.value(bounds(expression, &Range::first)).value_or(0);
    result.most = INT64_MAX;
    const std::map<std::string, int64_t> largest = bounds(expression, &Range::second);
    if (std::all_of(largest.begin(), largest.end(), [](const auto& one) { return one.second < kNoLimit; })) {
      result.most = expression.value(largest).value_or(INT64_MAX);
    }
    return result;
  }

  std::map<std::string, int64_t> bounds(const SizeExpression& expression, int64_t Range::*bound) const {
    std::map<std::string, int64_t> result;
    for (const std::string& symbol : expression.symbols()) {
      const auto range = ranges_.find(symbol);
      result[symbol] = (range == ranges_.end() ? Range(0, INT64_MAX) : range->second).*bound;
    }
    return result;
  }

  // Names of arguments of forward, where the file has them for all.
  void name_inputs() {
    const json* const signature = forward_signature();
    if (signature == nullptr) return;
    const json arguments = signature->value("forward_arg_names", json());
    std::vector<std::string> positional;
    if (arguments.is_array()) positional = arguments.get<std::vector<std::string>>();
    const std::vector<std::string> names = input_names(signature->value("in_spec", std::string()), positional);
    if (names.size() != program_->inputs.size()) return;
    for (size_t i = 0; i < names.size(); ++i) program_->inputs[i].name = names[i];
  }

  const json* forward_signature() const {
    const json& calls = module_.at("module_call_graph");
    if (!calls.is_array() || calls.empty() || !calls.at(0).contains("signature")) return nullptr;
    const json& signature = calls.at(0).at("signature");
    return signature.is_object() ? &signature : nullptr;
  }

  // export makes one input of two that are one tensor, and leaves the other one unread.
  void require_used_inputs(const std::unordered_set<std::string_view>& read_values) const {
    for (size_t i = 0; i < value_names_.size(); ++i) {
      archive_.require_good(
          value_names_[i].empty() || read_values.contains(value_names_[i]), "the program does not read the input \"",
          program_->inputs[i].name,
          "\". Two inputs of torch.export.export that were one tensor become one: export with a "
          "tensor of its own for each (x.clone()). If forward ignores it, say so by ExportedOptions::unused_inputs");
    }
  }

  InputSource lifted_of(const std::string& name) const {
    const auto found = lifted_places_.find(name);
    archive_.require_good(found != lifted_places_.end(), "the buffer \"", shown_text(name),
                          "\" that the program changes is none of its own", kDamaged);
    return {.is_lifted = true, .index = found->second};
  }

  InputSource input_of(const std::string& name) const {
    const auto found = std::find(value_names_.begin(), value_names_.end(), name);
    // A baked input has no value in the graph, and its name is empty.
    archive_.require_good(!name.empty() && found != value_names_.end(), "the input \"", shown_text(name),
                          "\" that the program changes is none of its own", kDamaged);
    return {.is_lifted = false, .index = static_cast<size_t>(found - value_names_.begin())};
  }

  void add_mutation(size_t output, const InputSource& target) {
    program_->mutations.push_back({.output = output, .target = target});
    for (InputSource& source : program_->sources) {
      if (source.is_lifted == target.is_lifted && source.index == target.index) source.is_written = true;
    }
  }

  void read_outputs() {
    const json& specs = module_.at("signature").at("output_specs");
    archive_.require_good(specs.size() == program_->main().outputs.size(), "its graph has ",
                          program_->main().outputs.size(), " outputs, its signature ", specs.size(), kDamaged);
    for (size_t i = 0; i < specs.size(); ++i) {
      const json& spec = specs.at(i);
      if (spec.contains("user_output")) {
        program_->user_outputs.push_back(i);
      } else if (spec.contains("buffer_mutation")) {
        add_mutation(i, lifted_of(spec.at("buffer_mutation").at("buffer_name").get<std::string>()));
      } else if (spec.contains("user_input_mutation")) {
        add_mutation(i, input_of(spec.at("user_input_mutation").at("user_input_name").get<std::string>()));
      } else {
        archive_.fail(cat("an output of the kind ", shown_text(spec.dump()),
                          " cannot be trained; export the model itself, not a graph with its backward pass, and do not "
                          "change parameters in forward"));
      }
    }
    const json* const signature = forward_signature();
    std::vector<std::string> names;
    if (signature != nullptr) names = output_names(signature->value("out_spec", std::string()));
    if (names.size() != program_->user_outputs.size()) {
      names.clear();
      for (size_t i = 0; i < program_->user_outputs.size(); ++i) names.push_back(cat(i));
    }
    program_->output_names = std::make_shared<const std::vector<std::string>>(std::move(names));
  }

  const Archive& archive_;
  const json& from_;
  const json& module_;
  const ExportedOptions& options_;
  const TensorOfName& tensor_;
  StoredTensors weights_;
  StoredTensors constants_;
  std::unique_ptr<Program> program_;
  std::map<std::string, Range> ranges_;
  std::map<std::string, size_t> lifted_places_;  // in Program::lifted, by name
  std::set<std::string> batch_counts_;           // values of the main graph
  std::vector<std::string> value_names_;         // of inputs: their values in the main graph; empty: a baked one
  std::string device_type_;
  bool has_dtype_ = false;
};

}  // namespace

std::unique_ptr<Program> read_program(const Archive& archive, const json& json, const ExportedOptions& options,
                                      const TensorOfName& tensor) {
  return archive.reading(options.program, [&] { return ProgramReader(archive, json, options, tensor).read(); });
}

}  // namespace ds::exported
