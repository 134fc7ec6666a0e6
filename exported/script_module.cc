#include "dsengine/script_module.h"

#include <torch/csrc/jit/runtime/graph_executor.h>

#include <utility>

#include "core/check.h"
#include "exported/module_tree.h"

namespace ds {

ScriptModule::ScriptModule(torch::jit::Module module) : torch::nn::Module("ScriptModule"), module_(std::move(module)) {
  require(module_.find_method("forward").has_value(), "adapt: the TorchScript module has no method forward");
  exported::ModuleTree tree(*this);
  for (const auto& parameter : module_.named_parameters()) {
    tree.add_parameter(parameter.name, parameter.value, parameter.value.requires_grad());
  }
  for (const auto& buffer : module_.named_buffers()) tree.add_buffer(buffer.name, buffer.value);
  require(!parameters().empty(),
          "adapt: the TorchScript module has no parameters; torch.jit.freeze and optimize_for_inference make constants "
          "of them: save the module without these");
  torch::nn::Module::train(module_.is_training());
}

c10::IValue ScriptModule::run(std::vector<c10::IValue> inputs) {
  // The optimizer would differentiate parts of the graph by itself, on tensors that the engine does not know.
  const torch::jit::GraphOptimizerEnabledGuard without_optimizer(false);
  return module_.forward(std::move(inputs));
}

void ScriptModule::train(bool on) {
  torch::nn::Module::train(on);
  module_.train(on);
}

at::Tensor ScriptModule::tensor_of(const c10::IValue& result) {
  require(result.isTensor(), "forward returns ", result.tagKind(), ", not one tensor; take it from run()");
  return result.toTensor();
}

std::shared_ptr<ScriptModule> adapt(torch::jit::Module module) {
  return std::make_shared<ScriptModule>(std::move(module));
}

}  // namespace ds
