// Layers whose tensors have the names of a whole model, where a layer of a pipeline otherwise has them below its own
// name: parts of a program that were cut at places that its names do not follow (model/stages/exported_pipeline.cc).
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/layer_spec.h"

namespace ds::pipeline {

// A tensor of a layer by all its names in the whole model, of which it has at least one, in one order on all ranks.
struct WholeTensor {
  std::vector<std::string> names;
  int64_t trained = 0;  // the number of its elements; 0: it is not trained
};

// The tensors of a layer. Its module has registered them under their first names; layers that name the same tensor
// share it.
using WholeNames = std::vector<WholeTensor>;

// A LayerSpec is such a layer if this is its `call`.
class CallWithWholeNames {
 public:
  using Call = std::function<Tensors(torch::nn::Module*, const Tensors&)>;
  CallWithWholeNames(WholeNames names, Call call) : names_(std::move(names)), call_(std::move(call)) {}

  Tensors operator()(torch::nn::Module* module, const Tensors& inputs) const { return call_(module, inputs); }
  const WholeNames& names() const { return names_; }

 private:
  WholeNames names_;
  Call call_;
};

// The names of a layer's tensors in the whole model; null: they are below the layer's name.
inline const WholeNames* whole_names_of(const LayerSpec& layer) {
  const auto* const call = layer.call.target<CallWithWholeNames>();
  return call == nullptr ? nullptr : &call->names();
}

}  // namespace ds::pipeline
