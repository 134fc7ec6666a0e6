// GPT-2 as Hugging Face's transformers keeps it: config.json, and weights under its names.
//
// Theirs and ours: h.N.ln_1 is ln1, attn.c_attn attn.qkv, attn.c_proj attn.proj, ln_2 ln2, mlp.c_fc mlp.fc, mlp.c_proj
// mlp.proj, lm_head head; wte, wpe and ln_f are alike. Their four matrices of a block are [inputs, outputs] (Conv1D),
// ours [outputs, inputs].
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "gpt_model.h"

namespace gpt {

// "h.0.attn.qkv.weight" -> "transformer.h.0.attn.c_attn.weight".
std::string gpt2_name(const std::string& name);
// Whether that parameter is stored transposed there.
bool is_transposed_in_gpt2(const std::string& name);

// The model that folder/config.json describes. Throws ds::IoError when it cannot be read, ds::ConfigError naming the
// key that this model cannot follow: another model_type, activation_function (gelu_new and gelu are there),
// layer_norm_epsilon, n_inner, scaling of attention scores, cross attention. Dropout is not applied, whatever it says.
GptConfig read_gpt2_config(const std::string& folder);

// Fills all parameters from the weights in `folder` (model.safetensors or shards with their index; names with or
// without "transformer."; any floating-point dtype). Masks (attn.bias, attn.masked_bias), and lm_head.weight of a tied
// head, are left out. Throws ds::IoError naming a tensor that is missing, too much or of another shape.
void load_gpt2_weights(Gpt& model, const std::string& folder);

// Writes config.json and model.safetensors such that transformers.GPT2LMHeadModel.from_pretrained(folder) is this
// model. `weights`: by our names, whole, a tied head only as wte.weight. Throws ds::IoError.
void export_gpt2(const GptConfig& config, const std::vector<std::pair<std::string, at::Tensor>>& weights,
                 const std::string& folder);

}  // namespace gpt
