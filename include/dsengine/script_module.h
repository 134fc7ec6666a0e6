// TorchScript modules (torch.jit.script, torch.jit.trace), trained as models of this library.
//
//   auto model = ds::adapt(torch::jit::load("model.pt"));            // a torch::nn::Module
//   auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = "ds_config.json"});
//   engine->backward(loss_of(model->forward(x)));
//   ...
//   engine->synchronize_parameters();
//   model->script().save("trained.pt");
//
// TorchScript is deprecated in PyTorch: for a new model export it (dsengine/exported_model.h), which also checks
// inputs, names Python's lines in errors, and replaces dropout and BatchNorm by what Python does in eval().
//
// Parameters and buffers are those of the TorchScript module, registered in plain modules under Python's names, so that
// whatever goes by names works. They are shared: what trains here is trained there. TorchScript has no non-persistent
// buffers, so that load_state_dict(strict=True) in Python may find more keys than it expects. Tensors that a module has
// as plain attributes, and constants of a trace, do not follow to another device or dtype.
//
// forward() runs TorchScript's interpreter without its optimizer: the operators of the model one by one, under autograd
// and as eager Python calls them. A module belongs to the thread that calls it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace ds {

// The model. Made by adapt().
class ScriptModule : public torch::nn::Module {
 public:
  explicit ScriptModule(torch::jit::Module module);

  // Runs forward and returns its only result. Throws UsageError where that is no tensor (take it from run()), and what
  // run() throws.
  template <class... Inputs>
  at::Tensor forward(const Inputs&... inputs) {
    return tensor_of(run({c10::IValue(inputs)...}));
  }
  // Runs forward and returns what it returns: a tensor, a tuple, a dict. Throws what TorchScript throws, which names
  // the line in Python: std::runtime_error, also for errors of dsengine inside of it.
  c10::IValue run(std::vector<c10::IValue> inputs);

  // Turns the TorchScript module too.
  void train(bool on = true) override;

  // The module that was adapted: its other methods, and save(). At stage 3 its parameters are there inside a
  // zero::GatheredParameters scope.
  torch::jit::Module& script() { return module_; }

 private:
  static at::Tensor tensor_of(const c10::IValue& result);

  torch::jit::Module module_;
};

// Returns a module that shares the parameters and buffers of `module`. Throws UsageError for one that has no method
// forward or no parameters (torch.jit.freeze makes constants of them).
std::shared_ptr<ScriptModule> adapt(torch::jit::Module module);

}  // namespace ds
