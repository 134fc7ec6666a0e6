// Models that Python's torch.export has written (.pt2), trained in C++.
//
//   torch.export.save(torch.export.export(model.train(), (x,), dynamic_shapes=...), "model.pt2")   # Python, once
//
//   auto model = ds::load_exported("model.pt2");                       // a torch::nn::Module
//   auto [engine, optimizer, loader, schedule] = ds::engine::initialize({.model = model, .config = "ds_config.json"});
//   const at::Tensor loss = model->forward({{"input_ids", x}, {"labels", y}})["loss"];  // or model->forward(x)
//   engine->backward(loss);
//
// Parameters and buffers are registered in plain modules under their Python names, so that whatever goes by names
// (recomputed modules, split rules, parameter groups, weights, units of fully_shard) works, and saved weights fit
// load_state_dict(strict=True) in Python. Two names of one tensor are one tensor. What Python has frozen is frozen.
// Non-persistent buffers and constants belong to the module and are not registered: they are in no saved file.
//
// forward() calls the operators of the exported graph in their order through LibTorch's dispatcher, under autograd and
// autocast as they are when it is called, and drops each tensor after its last use. Tensors that the graph makes are
// made on the device of the first floating-point parameter, where constants and non-persistent buffers follow it.
//
// Export bakes the mode. Export in train(): in eval() the module then runs dropout, batch_norm, recurrent layers and
// attention as Python's eval() does, and counts no batches. What Python decides by `if self.training:` beyond these
// needs a second file, exported in eval() (.eval). A file exported in eval() alone refuses train() in forward.
// Export also bakes dtypes (x.float(), zeros(dtype=...)): export in the dtype that trains, or use torch_autocast.
//
// Files of torch 2.9 and newer load (schema 8). Nothing in them is run: no pickle is read, no library is loaded.
// Operators of other libraries have to be registered before load_exported() is called. Of the operators of higher
// order, torch.no_grad()/enable_grad() blocks, torch.autocast blocks and torch.cond run; others are refused by name.
//
// A module belongs to the thread that calls it, as any torch::nn::Module. docs/exported_models.md is the guide.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ds {

namespace exported {
struct Program;
}  // namespace exported

// Options of load_exported().
struct ExportedOptions {
  // A second file, exported from the same model in eval(): what forward() runs in eval(). Its parameters and buffers
  // are those of the first file, by name; its values for them are not read. Each file then runs as it was exported.
  // Empty: the first file serves both modes.
  std::string eval;
  // The name of the program in both files: "model" from torch.export.save, another one from package_pt2.
  std::string program = "model";
  // True: parameters and persistent buffers are on the meta device, without memory, and InitializeOptions::weights =
  // "model.pt2" (the same file, or any other with these names) gives each rank its part of their values.
  bool meta = false;
  // True: train() and eval() run what was exported, whatever its mode. For models in which layers evaluate while others
  // train (BatchNorm with fixed statistics) or train while others evaluate (dropout that stays), and for programs after
  // run_decompositions().
  bool baked_mode = false;
  // True: inputs that the program does not read are no error.
  bool unused_inputs = false;
};

// One dimension of an input. A dynamic one has a symbol, which is the same for dimensions that must be equal.
struct ExportedSize {
  int64_t least = 0;   // the smallest allowed size; of a fixed dimension the size
  int64_t most = 0;    // the largest allowed size, INT64_MAX: without a limit; of a fixed dimension the size
  std::string symbol;  // "s77", or an expression of symbols, "2*s77"; empty: the dimension is fixed

  bool operator==(const ExportedSize&) const = default;
};

// One argument of forward().
struct ExportedInput {
  std::string name;                      // of the argument of Python's forward; inside a container "batch.x", "xs.0"
  bool is_tensor = true;                 // false: a number, text or None that was given to export, and is baked
  at::ScalarType dtype = at::kFloat;     // of a tensor
  std::vector<ExportedSize> sizes = {};  // of a tensor
  c10::IValue value = {};                // where it is no tensor: the value that was baked
};

// Inputs of forward() by name, in any order. Baked ones may be left out.
using ExportedInputs = std::vector<std::pair<std::string, c10::IValue>>;

// What one call of forward() has returned: tensors, and where Python's forward returns them, numbers.
class ExportedOutputs {
 public:
  ExportedOutputs(std::shared_ptr<const std::vector<std::string>> names, std::vector<c10::IValue> values)
      : names_(std::move(names)), values_(std::move(values)) {}

  // The names of a dict, a dataclass or a named tuple; "0", "1", ... where Python's forward returns a tuple. Names of
  // nested containers are joined by dots: "past.0".
  const std::vector<std::string>& names() const { return *names_; }
  const std::vector<c10::IValue>& values() const { return values_; }
  size_t size() const { return values_.size(); }

  // Return one tensor. Throw UsageError naming up to 20 outputs where there is none of that name or number, or where it
  // is no tensor.
  at::Tensor operator[](const std::string& name) const;
  at::Tensor operator[](const char* name) const { return (*this)[std::string(name)]; }
  at::Tensor operator[](size_t index) const;
  at::Tensor operator[](int index) const { return (*this)[static_cast<size_t>(index)]; }
  // Returns the only output. Throws UsageError where there are several, or where it is no tensor.
  at::Tensor tensor() const;

 private:
  std::shared_ptr<const std::vector<std::string>> names_;
  std::vector<c10::IValue> values_;
};

// The model. Made by load_exported(), and owned by whoever holds the shared_ptr.
class ExportedModule : public torch::nn::Module {
 public:
  ~ExportedModule() override;

  // Runs the model and returns its only output. `inputs`: tensors, or baked values, in the order of inputs(); baked
  // ones may be left out behind the last tensor. Throws as run() does, and UsageError where the model has several
  // outputs: these are taken by name, from forward({{"x", x}})["loss"], or from run().
  template <class... Inputs>
  at::Tensor forward(const Inputs&... inputs) {
    return run({c10::IValue(inputs)...}).tensor();
  }
  // Runs the model with inputs by name. Throws as run() does, and UsageError for a name that it does not have, one
  // given twice, or one that is missing.
  ExportedOutputs forward(const ExportedInputs& inputs);
  // Runs the model with inputs by position.
  //
  // Throws UsageError before anything runs, naming input and dimension, for an input of another number of dimensions,
  // kind of dtype or size than the file allows, another value than the baked one, and for a mode that the file does not
  // have. What an operator throws while it runs comes as UsageError that names the operator, its module and the
  // line in Python; a lack of memory and errors of dsengine that are no UsageError keep their type.
  ExportedOutputs run(std::vector<c10::IValue> inputs);

  // The arguments of forward, in Python's order, containers flattened.
  const std::vector<ExportedInput>& inputs() const;
  // The names of what forward returns (ExportedOutputs::names()).
  const std::vector<std::string>& outputs() const;
  // Every operator of the program, as "aten.linear.default", sorted, each once.
  std::vector<std::string> operators() const;
  // The file that it was read from, and the version of torch that wrote it.
  const std::string& path() const;
  const std::string& torch_version() const;

  // Throws ConfigError where the model's floating-point dtype becomes `dtype` (bf16 or fp16 in the config), another
  // than the export's, and nodes of the first file have the export's baked; names the first three with Python's lines.
  // `key`: of the config, for the message. initialize() calls it.
  void require_dtype(at::ScalarType dtype, const std::string& key) const;
  // Says where Python reads a parameter, for messages: "aten.linear.default in module "h.0.fc", in Python: File
  // "model.py", line 19, in forward: ..."; empty for a name that no operator reads.
  std::string reader_of(const std::string& parameter) const;

 private:
  friend std::shared_ptr<ExportedModule> load_exported(const std::string& path, const ExportedOptions& options);
  ExportedModule();

  // The program of the module's mode.
  exported::Program& program() const;

  std::unique_ptr<exported::Program> train_program_;
  std::unique_ptr<exported::Program> eval_program_;  // null: train_program_ serves both modes
};

// Reads an exported model. Files are mapped: with .meta no value of a parameter is read.
//
// Inside a zero::Init scope each parameter is handed to it when it is read. Throws IoError, naming the file and what to
// do in Python, for a file that is damaged, of another format or schema, or made by torch 2.8 or older, and for what
// cannot be trained: operators that this LibTorch lacks, operators of higher order, custom objects, tensor subclasses,
// inputs that the program does not read, because two inputs of export were one tensor.
std::shared_ptr<ExportedModule> load_exported(const std::string& path, const ExportedOptions& options = {});

// Writes the exported model in the file `exported` to `path` once more, with other values of its parameters and
// buffers: Python's torch.export.load, AOTInductor and load_exported() take the result as they take `exported`. All
// else stays byte for byte.
//
// `tensors`: full tensors by Python's names, on any device and of any floating-point dtype (integers or bool
// where the file has these), as Engine::module_state_dict() returns them; a tied parameter by any of its names. Names
// that are left out keep their values. `program`: the program of a file of several (package_pt2) whose tensors are
// written; empty: those of each program that has the name. Throws UsageError for a name that the file does not have,
// other sizes, and two names of one tensor with different values; IoError for the files. `path` gets the file complete,
// or stays as it was.
void save_exported(const std::string& path, const std::string& exported,
                   const std::vector<std::pair<std::string, at::Tensor>>& tensors, const std::string& program = {});

}  // namespace ds
