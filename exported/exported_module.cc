#include "dsengine/exported_model.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/listed.h"
#include "core/without_stack.h"
#include "exported/archive.h"
#include "exported/input_check.h"
#include "exported/interpreter.h"
#include "exported/module_tree.h"
#include "exported/program.h"
#include "exported/program_reader.h"

namespace ds {
namespace exported {
namespace {

// Registers the tensors of a file in modules under their dotted names.
class RegisteredTensors {
 public:
  RegisteredTensors(torch::nn::Module& root, const Archive& archive, bool meta)
      : tree_(root), archive_(archive), meta_(meta) {}

  // Makes the modules of the file, in Python's order.
  void add_modules(const nlohmann::json& program) { tree_.add_modules(program); }

  at::Tensor add(LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
    using enum LiftedTensor::Kind;
    const auto known = tensors_.find(name);
    if (known != tensors_.end()) return known->second;
    at::Tensor value;
    if (kind == kParameter) {
      const auto [place, is_new] = parameters_.try_emplace(stored);
      if (is_new) place->second = archive_.make(stored, meta_);
      value = place->second;
      tree_.add_parameter(name, value, stored.requires_grad);
    } else {
      value = archive_.make(stored, meta_ && kind == kBuffer);
      // LibTorch has no buffers that stay out of state dicts: those are the program's own, as constants are.
      if (kind == kBuffer) tree_.add_buffer(name, value);
    }
    tensors_.emplace(name, value);
    return value;
  }

  // The tensor that a second program has under a name of the first one's.
  at::Tensor find(LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) const {
    using enum LiftedTensor::Kind;
    ensure(kind != kConstant, "a constant belongs to its own file");
    const auto found = tensors_.find(name);
    const bool known = found != tensors_.end();
    require_same_tensor(name, stored.sizes, known ? std::optional(found->second.sizes()) : std::nullopt);
    return found->second;
  }

 private:
  ModuleTree tree_;
  const Archive& archive_;
  bool meta_;
  std::map<std::string, at::Tensor> tensors_;
  std::map<StoredTensor, at::Tensor, ByPlace> parameters_;  // tied ones once
};

std::unique_ptr<Program> read_main(const Archive& archive, const ExportedOptions& options, RegisteredTensors& tensors) {
  const nlohmann::json document = archive.program(options.program);
  archive.reading(options.program, [&] { tensors.add_modules(document); });
  return read_program(archive, document, options,
                      [&](LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
                        return tensors.add(kind, name, stored);
                      });
}

std::unique_ptr<Program> read_eval(const ExportedOptions& options, const Program& train,
                                   const RegisteredTensors& tensors) {
  const Archive archive(options.eval);
  std::unique_ptr<Program> program =
      read_program(archive, archive.program(options.program), options,
                   [&](LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
                     if (kind == LiftedTensor::Kind::kConstant) return archive.make(stored, false);
                     return tensors.find(kind, name, stored);
                   });
  require_eval_of(train, *program);
  return program;
}

}  // namespace
}  // namespace exported

at::Tensor ExportedOutputs::operator[](const std::string& name) const {
  const auto found = std::find(names_->begin(), names_->end(), name);
  require(found != names_->end(), "forward has no output \"", name, "\"; it returns ",
          lazy([&] { return listed(*names_, 20); }));
  return (*this)[static_cast<size_t>(found - names_->begin())];
}

at::Tensor ExportedOutputs::operator[](size_t index) const {
  require(index < values_.size(), "forward has no output ", index, "; it returns ",
          lazy([&] { return listed(*names_, 20); }));
  require(values_[index].isTensor(), "the output \"", (*names_)[index], "\" is no tensor; take it from values()");
  return values_[index].toTensor();
}

at::Tensor ExportedOutputs::tensor() const {
  require(values_.size() == 1, "forward returns ", values_.size(), " values (",
          lazy([&] { return listed(*names_, 20); }),
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
  exported::require_mode(program, is_training(), eval_program_ != nullptr);
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
  exported::require_dtype(*train_program_, dtype, key);
}

std::string ExportedModule::reader_of(const std::string& parameter) const {
  const auto& lifted = train_program_->lifted;
  const auto found = std::find_if(lifted.begin(), lifted.end(), [&](const auto& one) { return one.name == parameter; });
  std::vector<std::string> names;
  for (const exported::LiftedTensor& one : lifted) {
    if (found != lifted.end() && one.value.is_same(found->value)) names.push_back(one.name);
  }
  return exported::first_reader(*train_program_, names);
}

std::shared_ptr<ExportedModule> load_exported(const std::string& path, const ExportedOptions& options) {
  const at::NoGradGuard no_grad;
  const std::shared_ptr<ExportedModule> module(new ExportedModule());
  try {
    const exported::Archive archive(path);
    exported::RegisteredTensors tensors(*module, archive, options.meta);
    module->train_program_ = exported::read_main(archive, options, tensors);
    if (!options.eval.empty()) module->eval_program_ = exported::read_eval(options, *module->train_program_, tensors);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw IoError(cat(path, ": ", without_stack(error.what_without_backtrace()), exported::kDamaged));
  }
  return module;
}

}  // namespace ds
