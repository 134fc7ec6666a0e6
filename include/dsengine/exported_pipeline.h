// Models that Python's torch.export has written (.pt2), cut into the layers of a pipeline.
//
//   auto model = ds::load_exported_pipeline("model.pt2", {.labels = {"labels"}});
//   auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = "ds_config.json"});
//   for (...) at::Tensor loss = engine->train_batch();         // "pipeline": {"stages": 4} in the config
//
// The graph is cut between the modules of a list, "model.layers.*": what comes before the first block, each block, and
// what comes behind the last one is a layer each (dsengine/pipeline.h). A rank reads the tensors of its own layers
// only. Their names are Python's, whatever the number of stages, so that checkpoints and saved weights are those of the
// module of load_exported(). A parameter that layers of several stages read is tied.
//
// Hidden states and the inputs that later layers read travel between stages. What depends on inputs and constants alone
// (positions, rotary tables, masks, sizes) is computed once a micro-batch on each rank that reads it. What depends on
// labels is computed behind the last layer, from the labels of the micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/exported_model.h"
#include "dsengine/pipeline.h"

namespace ds {

// Options of load_exported_pipeline().
struct ExportedPipelineOptions {
  // The list of modules between which the graph is cut: "model.layers.*", with a star for the number of a block. Empty:
  // the list whose modules have the most nodes.
  std::string blocks;
  // The inputs that the loss alone reads, in the order of MicroBatch::labels. All other inputs are MicroBatch::inputs,
  // in Python's order, without baked ones.
  std::vector<std::string> labels;
  // The output of forward that is the loss, where `pipeline` has no loss function. Of a program with one output any
  // name is right.
  std::string loss = "loss";
  // A loss function here takes the outputs of forward that need no label, and the labels; it replaces what the program
  // computes from these.
  pipeline::PipelineOptions pipeline;
  // As of load_exported(), but for `meta`, which is a UsageError: each rank reads what it has.
  ExportedOptions file;
};

// The pipeline. Made by load_exported_pipeline(), and owned by whoever holds the shared_ptr.
class ExportedPipeline : public pipeline::PipelineModule {
 public:
  ~ExportedPipeline() override;

  // The inputs of the first stage, in the order of MicroBatch::inputs.
  std::vector<std::string> inputs() const;
  // The names of what the last layer returns first, which evaluation gives as logits. Tensors that the loss needs
  // beside them stand behind these.
  const std::vector<std::string>& outputs() const;

  // Throws ConfigError as ExportedModule::require_dtype(). initialize() calls it.
  void require_dtype(at::ScalarType dtype, const std::string& key) const;
  // Says where Python reads a parameter, as ExportedModule::reader_of().
  std::string reader_of(const std::string& parameter) const;

 private:
  friend std::shared_ptr<ExportedPipeline> load_exported_pipeline(const std::string& path,
                                                                  ExportedPipelineOptions options);
  struct Source;
  ExportedPipeline(std::shared_ptr<Source> source, std::vector<pipeline::LayerSpec> layers,
                   pipeline::PipelineOptions options);

  std::shared_ptr<Source> source_;
};

// Reads an exported model as a pipeline; with one stage it trains as the module of load_exported() does. Throws IoError
// as load_exported(), and UsageError, with Python's line where there is one, for a program that cannot be cut: without
// such a list of modules or such labels; one whose loss reads parameters beside the labels; one whose blocks hand on
// numbers, or change in place what several of them have; one without a loss.
std::shared_ptr<ExportedPipeline> load_exported_pipeline(const std::string& path, ExportedPipelineOptions options = {});

}  // namespace ds
