// Files of a whole module as torch::save(module, path) of LibTorch writes them, made from names and tensors alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ds::checkpoint {

// One tensor of a module. `name` is dotted, as Module::named_parameters() and named_buffers() give it.
struct ModuleTensor {
  std::string name;
  at::Tensor values;  // on the CPU, in memory that holds nothing else, which would be written too
  bool is_buffer = false;
};

// Returns the names of the modules that have neither parameters nor buffers in them, such as activations.
// torch::load(module, path) wants them in the file as any other.
std::vector<std::string> modules_without_tensors(const torch::nn::Module& module);

// Writes a file that torch::load(module, path) of LibTorch loads into any module that has these tensors, and no other
// modules without tensors than `empty_modules`. `path` gets it complete, or stays as it was. Throws IoError for the
// disk, and UsageError for names that no module has: given twice, of a module and a tensor, or with an empty part.
void write_module_file(const std::string& path, const std::vector<ModuleTensor>& tensors,
                       const std::vector<std::string>& empty_modules);

}  // namespace ds::checkpoint
