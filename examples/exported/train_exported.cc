// Trains any model that export.py, or another program of Python, has exported: what it is stands in the file alone.
//
//   cd examples/exported && ds-launch --num_procs 2 PATH/train_exported MODEL.pt2 MODEL.data.pt
//
// The data: a file of torch.save, or a .safetensors file, with a tensor for each input of the model's forward, one
// sample for each index of dimension 0. Each rank takes its part of the next ones, in the order of ranks. What forward
// returns as "loss", or alone, is minimised. MODEL.trained.pt2 is the same program with the trained weights, for
// Python.
#include <dsengine/checkpoint.h>
#include <dsengine/engine.h>
#include <dsengine/exported_model.h>
#include <dsengine/initialize.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

// All samples, by the names of forward's inputs.
ds::ExportedInputs read_data(const std::string& path, const ds::ExportedModule& model) {
  const auto file = ds::checkpoint::open_weights(path);
  ds::ExportedInputs data;
  for (const ds::ExportedInput& input : model.inputs()) {
    if (input.is_tensor) data.emplace_back(input.name, file->tensor(ds::checkpoint::weight_path(input.name)));
  }
  return data;
}

// The samples of a rank in its micro-batch number `step`, from 1: those of all ranks come one after the other, and
// behind the last sample the first one.
ds::ExportedInputs batch_of(const ds::ExportedInputs& data, ds::engine::Engine& engine, int64_t step) {
  const int64_t samples = data.at(0).second.toTensor().size(0);
  const int64_t size = engine.train_micro_batch_size_per_gpu();
  const auto chosen = torch::arange(size) + ((step - 1) * engine.dp_world_size() + engine.communicator().rank()) * size;
  ds::ExportedInputs batch;
  for (const auto& [name, tensor] : data) {
    batch.emplace_back(name, tensor.toTensor().index_select(0, chosen % samples).to(engine.device()));
  }
  return batch;
}

at::Tensor loss_of(const ds::ExportedOutputs& outputs) {
  return outputs.size() == 1 ? outputs.tensor() : outputs["loss"];
}

void train(const std::string& path, const std::string& data_path, const std::string& config, int64_t steps) {
  const auto model = ds::load_exported(path);
  const ds::ExportedInputs data = read_data(data_path, *model);
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = config});
  for (int64_t step = 1; step <= steps; ++step) {
    const at::Tensor loss = loss_of(model->forward(batch_of(data, *engine, step)));
    engine->backward(loss);
    engine->step();
    if (engine->global_rank() == 0 && (step % 20 == 0 || step == 1)) {
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
    }
  }
  const auto weights = engine->module_state_dict();  // gathered by all ranks
  if (engine->global_rank() != 0) return;
  const std::string trained = path.substr(0, path.rfind(".pt2")) + ".trained.pt2";
  ds::save_exported(trained, path, weights);
  std::cout << "wrote " << trained << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a model of torch.export", "train_exported");
  std::string model, data, config = "ds_config.json";
  int64_t steps = 100;
  app.add_option("model", model, "The .pt2 of torch.export.save")->required()->check(CLI::ExistingFile);
  app.add_option("data", data, "Samples by the names of its inputs")->required()->check(CLI::ExistingFile);
  app.add_option("--deepspeed_config", config, "The ds_config JSON file")->capture_default_str();
  app.add_option("--steps", steps, "Batches to train on")->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    train(model, data, config, steps);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "train_exported: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
