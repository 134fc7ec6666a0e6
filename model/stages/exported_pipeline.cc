#include "dsengine/exported_pipeline.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/listed.h"
#include "core/without_stack.h"
#include "exported/archive.h"
#include "exported/input_check.h"
#include "exported/interpreter.h"
#include "exported/module_tree.h"
#include "exported/program_cut.h"
#include "exported/program_reader.h"
#include "pipeline/whole_names.h"

namespace ds {
namespace exported {
namespace {

using pipeline::Tensors;
using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
using Values = std::vector<c10::IValue>;

Values values_of(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

Tensors tensors_of(Values values) {
  Tensors tensors;
  for (c10::IValue& value : values) tensors.push_back(std::move(value).toTensor());
  return tensors;
}

// What layers compute from the inputs of a micro-batch alone: once, for the layers of a rank that follow one another.
// Used by one thread.
class SharedValues {
 public:
  explicit SharedValues(Program program) : program_(std::move(program)) {}

  const Values& of(const Tensors& inputs, bool training) {
    const bool same =
        is_known_ && training == training_ && inputs.size() == inputs_.size() &&
        std::equal(inputs.begin(), inputs.end(), inputs_.begin(), [](const at::Tensor& input, const WeakTensor& known) {
          return known.lock().get() == input.unsafeGetTensorImpl();
        });
    if (same) return values_;
    values_ = run(program_, values_of(inputs), training);
    is_known_ = !c10::InferenceMode::is_enabled();  // autograd would not save such values later
    training_ = training;
    inputs_.clear();
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input.getIntrusivePtr());
    return values_;
  }

 private:
  Program program_;
  bool is_known_ = false;
  bool training_ = false;
  std::vector<WeakTensor> inputs_;  // of the values
  Values values_;
};

// A layer in one mode.
struct LayerInMode {
  ProgramPart part;
  std::shared_ptr<SharedValues> shared;
  bool is_first = false;

  Tensors run(const Tensors& inputs, bool training) {
    Program& program = part.program;
    require(inputs.size() == part.travelling, program.path, ": expected ", part.travelling, " tensors (",
            lazy([&] { return listed(names(), 20); }), "), found ", inputs.size());
    Values values = values_of(inputs);
    if (is_first) check_inputs(program, values);
    if (!part.shared.empty()) {
      Tensors from;
      for (const size_t i : part.shared_from) from.push_back(inputs[i]);
      const Values& all = shared->of(from, training);
      for (const size_t i : part.shared) values.push_back(all[i]);
    }
    return tensors_of(exported::run(program, values, training));
  }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (size_t i = 0; i < part.travelling; ++i) result.push_back(part.program.inputs[i].name);
    return result;
  }
};

// Where the loss of a program is: among the outputs of forward, or among what is computed from labels.
struct LossPlace {
  bool of_labels = false;
  size_t index = 0;
};

// A file, cut as it was exported.
struct CutFile {
  Program program;
  CutProgram parts;
  std::shared_ptr<SharedValues> shared;
  LayerInMode loss;
  LossPlace loss_place;  // of the program's own loss, where no function of the options replaces it
};

LossPlace find_loss(const CutFile& file, const std::string& name) {
  const CutProgram& parts = file.parts;
  const bool only = parts.output_names.size() + parts.loss_names.size() == 1;  // it has any name
  for (const std::vector<std::string>* const names : {&parts.output_names, &parts.loss_names}) {
    const auto found = only ? names->begin() : std::find(names->begin(), names->end(), name);
    if (found == names->end()) continue;
    return {.of_labels = names == &parts.loss_names, .index = static_cast<size_t>(found - names->begin())};
  }
  throw UsageError(cat(file.program.path, ": has no output \"", name, "\" that is the loss; it returns ",
                       listed(*file.program.output_names, 20),
                       ". Name it in ExportedPipelineOptions::loss, or give a loss function in .pipeline.loss"));
}

// A layer as a module: it has registered its tensors under the first of their names in the whole model.
class ExportedLayer : public torch::nn::Module {
 public:
  ExportedLayer(std::string name, LayerInMode train, std::optional<LayerInMode> eval, const torch::nn::Module& model)
      : torch::nn::Module(std::move(name)), train_(std::move(train)), eval_(std::move(eval)), model_(model) {}

  // The mode is that of the pipeline, which outlives its layers: a layer is none of its modules.
  Tensors forward(const Tensors& inputs) {
    const bool training = model_.is_training();
    LayerInMode& mode = eval_ && !training ? *eval_ : train_;
    require_mode(mode.part.program, training, eval_.has_value());
    return mode.run(inputs, training);
  }

  // Gives the tensors of the file to the programs of both modes.
  template <class Make>
  void make_tensors(const Make& make) {
    ModuleTree tree(*this);
    std::map<std::string, at::Tensor> registered;
    const auto give = [&](Program& program) {
      for (LiftedTensor& lifted : program.lifted) {
        if (lifted.value.defined()) continue;
        const auto [value, name, trains] = make(lifted);
        lifted.value = value;
        if (!registered.emplace(name, value).second) continue;
        if (lifted.kind == LiftedTensor::Kind::kParameter) {
          tree.add_parameter(name, value, trains);
        } else {
          tree.add_buffer(name, value);
        }
      }
    };
    give(train_.part.program);
    if (eval_) give(eval_->part.program);
  }

 private:
  LayerInMode train_;
  std::optional<LayerInMode> eval_;
  const torch::nn::Module& model_;
};

}  // namespace
}  // namespace exported

using exported::CutFile;
using exported::LiftedTensor;
using exported::StoredTensor;
using pipeline::Tensors;

// The files, and what layers are made from.
struct ExportedPipeline::Source {
  exported::Archive archive;
  exported::StoredTensors weights;
  torch::nn::Module root;  // of the modules of the file, in Python's order
  exported::ModuleTree modules{root};
  CutFile train;
  std::optional<CutFile> eval;
  std::map<std::string, std::vector<std::string>> names;  // of each parameter or buffer: all, by any of them
  std::map<std::string, exported::WeakTensor> made;       // by first name: those of layers that are built
  const torch::nn::Module* model = nullptr;               // the pipeline

  Source(const std::string& path, const ExportedPipelineOptions& options)
      : archive(path), weights(archive.weights(options.file.program)) {
    const nlohmann::json document = archive.program(options.file.program);
    archive.reading(options.file.program, [&] { modules.add_modules(document); });
    // Tensors of a module have no values before it is built; constants and non-persistent buffers are read at once.
    train = cut_file(
        *exported::read_program(archive, document, options.file,
                                [&](LiftedTensor::Kind kind, const std::string& /*name*/, const StoredTensor& stored) {
                                  return is_registered(kind) ? at::Tensor() : archive.make(stored, false);
                                }),
        options);
    note_names();
    if (!options.file.eval.empty()) read_eval(options);
  }

  static bool is_registered(LiftedTensor::Kind kind) {
    return kind == LiftedTensor::Kind::kParameter || kind == LiftedTensor::Kind::kBuffer;
  }

  static CutFile cut_file(exported::Program program, const ExportedPipelineOptions& options) {
    CutFile file;
    file.program = std::move(program);
    file.parts = exported::cut(file.program, {.blocks = options.blocks, .labels = options.labels});
    file.shared = std::make_shared<exported::SharedValues>(file.parts.shared);
    file.loss = {.part = file.parts.loss, .shared = file.shared};
    if (!options.pipeline.loss) file.loss_place = find_loss(file, options.loss);
    return file;
  }

  // The second file has the tensors of the first one, but for its constants.
  void read_eval(const ExportedPipelineOptions& options) {
    std::map<std::string, at::Tensor> others;  // non-persistent buffers of the first file
    for (const LiftedTensor& lifted : train.program.lifted) {
      if (lifted.kind == LiftedTensor::Kind::kNonPersistent) others[lifted.name] = lifted.value;
    }
    const exported::Archive second(options.file.eval);
    auto program =
        exported::read_program(second, second.program(options.file.program), options.file,
                               [&](LiftedTensor::Kind kind, const std::string& name, const StoredTensor& stored) {
                                 if (kind == LiftedTensor::Kind::kConstant) return second.make(stored, false);
                                 const auto other = others.find(name);
                                 std::optional<at::IntArrayRef> first;
                                 if (other != others.end()) first = other->second.sizes();
                                 if (names.contains(name)) first = weights.at(name).sizes;
                                 exported::require_same_tensor(name, stored.sizes, first);
                                 return other == others.end() ? at::Tensor() : other->second;
                               });
    exported::require_eval_of(train.program, *program);
    eval = cut_file(std::move(*program), options);
    require_same_layers(second);
  }

  void require_same_layers(const exported::Archive& second) const {
    const auto names_of = [](const CutFile& file) {
      std::vector<std::string> result;
      for (const exported::ProgramPart& layer : file.parts.layers) result.push_back(layer.name);
      return result;
    };
    const std::vector<std::string> expected = names_of(train);
    const std::vector<std::string> found = names_of(*eval);
    second.require_good(found == expected, "has the layers ", listed(found, 10), "; expected those of ",
                        train.program.path, ", ", listed(expected, 10), ": export both from one model");
  }

  // Parameters that have one place in the file are one tensor. A buffer has one name.
  void note_names() {
    std::map<StoredTensor, std::vector<std::string>, exported::ByPlace> parameters;
    for (const LiftedTensor& lifted : train.program.lifted) {
      if (lifted.kind == LiftedTensor::Kind::kParameter) parameters[weights.at(lifted.name)].push_back(lifted.name);
      if (lifted.kind == LiftedTensor::Kind::kBuffer) names[lifted.name] = {lifted.name};
    }
    for (const auto& [stored, all] : parameters) {
      for (const std::string& name : all) names[name] = all;
    }
  }

  exported::LayerInMode layer_in(const CutFile& file, size_t index) const {
    return {.part = file.parts.layers[index], .shared = file.shared, .is_first = index == 0};
  }

  pipeline::WholeNames names_of(size_t index) const {
    std::vector<const exported::Program*> programs = {&train.parts.layers[index].program};
    if (eval) programs.push_back(&eval->parts.layers[index].program);
    pipeline::WholeNames result;
    std::set<std::string> known;  // first names
    for (const exported::Program* const program : programs) {
      for (const LiftedTensor& lifted : program->lifted) {
        if (lifted.value.defined()) continue;
        const std::vector<std::string>& all = names.at(lifted.name);
        if (!known.insert(all.front()).second) continue;
        const StoredTensor& stored = weights.at(lifted.name);
        const bool trains = lifted.kind == LiftedTensor::Kind::kParameter && stored.requires_grad;
        result.push_back({.names = all, .trained = trains ? stored.numel() : 0});
      }
    }
    return result;
  }

  std::shared_ptr<exported::ExportedLayer> build(size_t index) {
    const at::NoGradGuard no_grad;
    std::optional<exported::LayerInMode> in_eval;
    if (eval) in_eval = layer_in(*eval, index);
    auto layer = std::make_shared<exported::ExportedLayer>(train.parts.layers[index].name, layer_in(train, index),
                                                           std::move(in_eval), *model);
    layer->make_tensors([&](const LiftedTensor& lifted) {
      const StoredTensor& stored = weights.at(lifted.name);
      const std::string& name = names.at(lifted.name).front();
      at::Tensor value;
      if (const auto known = made.find(name); known != made.end()) {
        if (auto alive = known->second.lock()) value = at::Tensor(std::move(alive));
      }
      if (!value.defined()) {
        value = archive.make(stored, false);
        made.insert_or_assign(name, exported::WeakTensor(value.getIntrusivePtr()));
      }
      return std::tuple(value, name, stored.requires_grad);
    });
    return layer;
  }

  static std::vector<pipeline::LayerSpec> layers(const std::shared_ptr<Source>& source) {
    std::vector<pipeline::LayerSpec> result;
    for (size_t i = 0; i < source->train.parts.layers.size(); ++i) {
      const exported::ProgramPart& part = source->train.parts.layers[i];
      pipeline::LayerSpec layer =
          pipeline::LayerSpec::made_by([source, i] { return source->build(i); }).named(part.name);
      layer.call = pipeline::CallWithWholeNames(source->names_of(i), layer.call);
      layer.type = part.block.empty() ? "graph" : source->modules.class_of(part.block);
      result.push_back(std::move(layer));
    }
    return result;
  }

  // The file that runs in the mode of the pipeline.
  CutFile& running() { return eval && !model->is_training() ? *eval : train; }

  // The loss of the program, or the one of the options over what forward returns without labels.
  static pipeline::LossFunction loss_of(const std::shared_ptr<Source>& source, const pipeline::LossFunction& given) {
    if (given) {
      return [source, given](const Tensors& outputs, const Tensors& labels) {
        const auto count = static_cast<std::ptrdiff_t>(source->running().parts.output_names.size());
        return given({outputs.begin(), outputs.begin() + count}, labels);
      };
    }
    return [source](const Tensors& outputs, const Tensors& labels) {
      CutFile& file = source->running();
      if (!file.loss_place.of_labels) return outputs.at(file.loss_place.index);
      Tensors inputs = outputs;
      inputs.insert(inputs.end(), labels.begin(), labels.end());
      return file.loss.run(inputs, source->model->is_training()).at(file.loss_place.index);
    };
  }
};

ExportedPipeline::~ExportedPipeline() = default;

ExportedPipeline::ExportedPipeline(std::shared_ptr<Source> source, std::vector<pipeline::LayerSpec> layers,
                                   pipeline::PipelineOptions options)
    : pipeline::PipelineModule(std::move(layers), std::move(options)), source_(std::move(source)) {
  source_->model = this;
  // All modules of the file on every rank, whatever its layers.
  for (const auto& child : source_->root.named_children()) register_module(child.key(), child.value());
}

std::vector<std::string> ExportedPipeline::inputs() const { return source_->layer_in(source_->train, 0).names(); }
const std::vector<std::string>& ExportedPipeline::outputs() const { return source_->train.parts.output_names; }

void ExportedPipeline::require_dtype(at::ScalarType dtype, const std::string& key) const {
  exported::require_dtype(source_->train.program, dtype, key);
}

std::string ExportedPipeline::reader_of(const std::string& parameter) const {
  const auto names = source_->names.find(parameter);
  return names == source_->names.end() ? std::string() : exported::first_reader(source_->train.program, names->second);
}

std::shared_ptr<ExportedPipeline> load_exported_pipeline(const std::string& path, ExportedPipelineOptions options) {
  require(!options.file.meta, "load_exported_pipeline: file.meta: expected false, found true: each rank reads the ",
          "tensors of its own layers; remove it");
  try {
    const auto source = std::make_shared<ExportedPipeline::Source>(path, options);
    options.pipeline.loss = source->loss_of(source, options.pipeline.loss);
    return std::shared_ptr<ExportedPipeline>(
        new ExportedPipeline(source, source->layers(source), std::move(options.pipeline)));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw IoError(cat(path, ": ", without_stack(error.what_without_backtrace()), exported::kDamaged));
  }
}

}  // namespace ds
