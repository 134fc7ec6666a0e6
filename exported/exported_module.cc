#include "dsengine/exported_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/listed.h"
#include "core/shown_text.h"
#include "core/without_stack.h"
#include "exported/archive.h"
#include "exported/input_check.h"
#include "exported/interpreter.h"
#include "exported/named_modules.h"
#include "exported/program.h"
#include "exported/program_reader.h"

namespace ds {
namespace exported {
namespace {

// Registers the tensors of a file in modules under their dotted names.
class ModuleTree {
 public:
  ModuleTree(torch::nn::Module& root, const Archive& archive, bool meta)
      : modules_(root), archive_(archive), meta_(meta) {}

  // Makes the modules of the file, in Python's order.
  void add_modules(const nlohmann::json& program) {
    for (const nlohmann::json& call : program.at("graph_module").at("module_call_graph")) {
      const auto name = call.at("fqn").get<std::string>();
      if (!name.empty() && name.find('@') == std::string::npos) modules_.owner_of(name + ".");
    }
  }

  at::Tensor add(LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
    using enum LiftedTensor::Kind;
    const auto known = tensors_.find(name);
    if (known != tensors_.end()) return known->second;
    at::Tensor value;
    if (kind == kParameter) {
      const auto [place, is_new] = parameters_.try_emplace(stored);
      if (is_new) place->second = make(stored, meta_);
      value = place->second;
      modules_.add_parameter(name, value, stored.requires_grad);
    } else {
      value = make(stored, meta_ && kind == kBuffer);
      // LibTorch has no buffers that stay out of state dicts: those are the program's own, as constants are.
      if (kind == kBuffer) modules_.add_buffer(name, value);
    }
    tensors_.emplace(name, value);
    return value;
  }

  // The tensor that a second program has under a name of the first one's.
  at::Tensor find(LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) const {
    using enum LiftedTensor::Kind;
    ensure(kind != kConstant, "a constant belongs to its own file");
    const auto found = tensors_.find(name);
    require<IoError>(found != tensors_.end(), "the first file has no tensor \"", shown_text(name),
                     "\"; export both from one model");
    require<IoError>(found->second.sizes() == at::IntArrayRef(stored.sizes), "\"", shown_text(name), "\" is [",
                     listed(stored.sizes, 8), "], in the first file ", found->second.sizes(),
                     "; export both from one model");
    return found->second;
  }

  static at::Tensor make_from(const Archive& archive, const StoredTensor& stored, bool meta) {
    const auto options = at::TensorOptions(stored.dtype).device(meta ? at::kMeta : at::kCPU);
    at::Tensor value = at::empty(stored.sizes, options);
    if (!meta) archive.read(stored, 0, value);
    return value;
  }

 private:
  at::Tensor make(const StoredTensor& stored, bool meta) const { return make_from(archive_, stored, meta); }

  NamedModules modules_;
  const Archive& archive_;
  bool meta_;
  std::map<std::string, at::Tensor> tensors_;
  std::map<StoredTensor, at::Tensor, ByPlace> parameters_;  // tied ones once
};

std::unique_ptr<Program> read_main(const Archive& archive, const ExportedOptions& options, ModuleTree& tree) {
  const nlohmann::json json = archive.program(options.program);
  try {
    tree.add_modules(json);
  } catch (const nlohmann::json::exception& error) {
    archive.fail(cat("the program \"", options.program, "\": ", shown_text(error.what()), kDamaged));
  }
  return read_program(archive, json, options,
                      [&](LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
                        return tree.add(kind, name, stored);
                      });
}

std::unique_ptr<Program> read_eval(const ExportedOptions& options, const Program& train, const ModuleTree& tree) {
  const Archive archive(options.eval);
  std::unique_ptr<Program> program =
      read_program(archive, archive.program(options.program), options,
                   [&](LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
                     if (kind == LiftedTensor::Kind::kConstant) return ModuleTree::make_from(archive, stored, false);
                     return tree.find(kind, name, stored);
                   });
  std::vector<std::string> names;
  for (const ExportedInput& input : program->inputs) names.push_back(input.name);
  std::vector<std::string> expected;
  for (const ExportedInput& input : train.inputs) expected.push_back(input.name);
  archive.require_good(names == expected, "has the inputs ", listed(names, 20), "; expected those of ", train.path,
                       ", ", listed(expected, 20));
  archive.require_good(options.baked_mode || !program->trains,
                       "was exported in train(), and is named as the program for eval(); export it after model.eval()");
  return program;
}

// Whether the program can run in a mode; empty text: it can.
std::string wrong_mode(const Program& program, bool training, bool has_eval) {
  if (program.baked_mode) return {};
  if (training && program.exported_in_eval) {
    return "was exported in eval(), so that it cannot train: call model.train() before torch.export.export, or "
           "eval() on this module to evaluate. A model in which these layers evaluate on purpose is loaded with "
           "ExportedOptions::baked_mode";
  }
  if (!training && !has_eval && program.decomposed) {
    return "was exported with run_decompositions(), which bakes the mode: export it without, give a second file as "
           "ExportedOptions::eval, or load it with ExportedOptions::baked_mode where both modes are one";
  }
  return {};
}

// Whether the node is an operator whose argument "dtype" was exported as `dtype`.
bool has_baked_dtype(const Node& node, at::ScalarType dtype) {
  if (node.kind != Node::Kind::kOperator) return false;
  const auto& declared = node.op->schema().arguments();
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const c10::IValue& value = node.arguments[i].constant;
    if (declared[i].name() == "dtype" && value.isInt()) return value.toInt() == static_cast<int64_t>(dtype);
  }
  return false;
}

}  // namespace
}  // namespace exported

at::Tensor ExportedOutputs::operator[](const std::string& name) const {
  const auto found = std::find(names_->begin(), names_->end(), name);
  require(found != names_->end(), "forward has no output \"", name, "\"; it returns ", listed(*names_, 20));
  return (*this)[static_cast<size_t>(found - names_->begin())];
}

at::Tensor ExportedOutputs::operator[](size_t index) const {
  require(index < values_.size(), "forward has no output ", index, "; it returns ", listed(*names_, 20));
  require(values_[index].isTensor(), "the output \"", (*names_)[index], "\" is no tensor; take it from values()");
  return values_[index].toTensor();
}

at::Tensor ExportedOutputs::tensor() const {
  require(values_.size() == 1, "forward returns ", values_.size(), " values (", listed(*names_, 20),
          "); take one by its name, forward({{\"x\", x}})[\"loss\"], or from run()");
  return (*this)[size_t{0}];
}

ExportedModule::ExportedModule() : torch::nn::Module("ExportedModule") {}
ExportedModule::~ExportedModule() = default;

exported::Program& ExportedModule::program() const {
  return !is_training() && eval_program_ != nullptr ? *eval_program_ : *train_program_;
}

ExportedOutputs ExportedModule::forward(const ExportedInputs& inputs) {
  return run(exported::by_name(program(), inputs));
}

ExportedOutputs ExportedModule::run(std::vector<c10::IValue> inputs) {
  exported::Program& program = this->program();
  const std::string wrong = exported::wrong_mode(program, is_training(), eval_program_ != nullptr);
  require(wrong.empty(), program.path, ": ", wrong);
  const std::vector<c10::IValue> all = exported::by_position(program, std::move(inputs));
  exported::check_inputs(program, all);
  return {program.output_names, exported::run(program, all, is_training())};
}

const std::vector<ExportedInput>& ExportedModule::inputs() const { return train_program_->inputs; }
const std::vector<std::string>& ExportedModule::outputs() const { return *program().output_names; }
const std::string& ExportedModule::path() const { return train_program_->path; }
const std::string& ExportedModule::torch_version() const { return train_program_->torch_version; }

std::vector<std::string> ExportedModule::operators() const {
  std::set<std::string> names;
  for (const exported::Program* const one : {train_program_.get(), eval_program_.get()}) {
    if (one == nullptr) continue;
    for (const exported::Graph& graph : one->graphs) {
      for (const exported::Node& node : graph.nodes) names.insert(node.target);
    }
  }
  return {names.begin(), names.end()};
}

void ExportedModule::require_dtype(at::ScalarType dtype, const std::string& key) const {
  const exported::Program& program = *train_program_;
  if (dtype == program.dtype) return;
  constexpr size_t kMostShown = 3;
  std::string shown;
  size_t count = 0;
  for (const exported::Graph& graph : program.graphs) {
    for (const exported::Node& node : graph.nodes) {
      if (!exported::has_baked_dtype(node, program.dtype)) continue;
      if (++count <= kMostShown) shown += cat("\n", exported::node_in_words(node), exported::line_in_python(node));
    }
  }
  if (count == 0) return;
  throw ConfigError(cat(key, ": ", program.path, " was exported in ", c10::toString(program.dtype), ", and ", count,
                        " of its operators have that dtype baked; export the model in ", c10::toString(dtype),
                        " (model.to(dtype) before torch.export.export), or keep its dtype and use torch_autocast. The "
                        "first ones:",
                        shown));
}

std::shared_ptr<ExportedModule> load_exported(const std::string& path, const ExportedOptions& options) {
  const at::NoGradGuard no_grad;
  const std::shared_ptr<ExportedModule> module(new ExportedModule());
  try {
    const exported::Archive archive(path);
    exported::ModuleTree tree(*module, archive, options.meta);
    module->train_program_ = exported::read_main(archive, options, tree);
    if (!options.eval.empty()) module->eval_program_ = exported::read_eval(options, *module->train_program_, tree);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw IoError(cat(path, ": ", without_stack(error.what_without_backtrace()), exported::kDamaged));
  }
  return module;
}

}  // namespace ds
