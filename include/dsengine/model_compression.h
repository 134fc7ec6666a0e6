// Training with compressed layers, as compression_training of a ds_config says: quantised weights and inputs, pruned
// elements, rows, heads and channels, fewer layers. The names are those of deepspeed.compression, for unmodified
// modules:
//
//   auto model = Gpt(config);
//   engine::init_compression(*model, "ds_config.json", teacher.get());    // teacher: for layer_reduction alone
//   auto [engine, ...] = engine::initialize({.model = model.ptr(), .config = "ds_config.json"});
//   ... train ...
//   checkpoint::write_weights("small.safetensors", engine::redundancy_clean(engine));
//
// Members of a LibTorch module have their types, so that no member is replaced. A layer (Linear, Embedding, Conv2d) is
// known by its weight, and the operators that get this weight compute otherwise: linear, embedding, conv2d, and addmm
// and matmul with the weight transposed, as torch::nn's Linear calls them, which adds its bias with add_. Gradients
// pass straight through to the weight, which stays as the optimizer has it. Learned scores ("topk") become parameters
// of a child "compression" of the layer; masks ("l1") and static ranges become buffers of it, under DeepSpeed's names.
// They are trained, sharded, saved and loaded as all others. Schedules are functions of the optimizer step.
// docs/model_compression.md.
//
// Modules are held by a shared_ptr (any ModuleHolder does); clone() of one that is prepared throws. A model is prepared
// while no other thread computes, and computed by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/engine.h"

namespace torch::nn {
class Module;
}

namespace ds::engine {

// Prepares the layers that the section names; returns their names, in the module's order. With layer_reduction the
// module, the student, first gets values of `teacher`, a model with more layers. initialize() does this for a module
// that has not been prepared, unless there is a layer_reduction. Throws ConfigError with the json path for patterns
// that match nothing and layers that do not fit, UsageError for a module that is prepared already, or has a layer that
// is. The module is the one that initialize() gets: a part of it, or one around it, is refused there.
std::vector<std::string> init_compression(torch::nn::Module& module, const config::ConfigSource& config,
                                          torch::nn::Module* teacher = nullptr);

// For loops without an engine, with the whole model on this rank: `steps` optimizer steps are done. Call it once before
// the first forward pass, with 0, and after each step: static ranges move when it is one more than before. Throws
// UsageError for another module than the one that init_compression() got, and for a step of training with
// "snip_momentum", whose gradients an engine alone shows.
void set_compression_step(torch::nn::Module& module, int64_t steps);

// The small model: full parameters and buffers by name, on the host, pruned and quantised to target_bits, without the
// dimensions that related_modules take away, nor scores and masks. The engine trains on as before. Collective. Throws
// UsageError for a method whose schedule_offset has not come, and where related layers do not fit. Throws it too where
// the model did not compute with what its layers would be left with. That is so for tied weights of different
// compression, for a layer that no operator came to while others were used, and for a bias that was added otherwise
// than to the product of its layer.
std::vector<std::pair<std::string, at::Tensor>> redundancy_clean(const std::shared_ptr<Engine>& engine);
// Makes the module itself small, which no engine holds: its layers are plain ones afterwards.
void redundancy_clean(torch::nn::Module& module);
// Gives a module built with the full sizes the values and sizes of a small one. Throws UsageError, before any change,
// when a name is missing.
void load_small_model(torch::nn::Module& module, const std::vector<std::pair<std::string, at::Tensor>>& state);

}  // namespace ds::engine
