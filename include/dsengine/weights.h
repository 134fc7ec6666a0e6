// Weights and checkpoints in files, without an engine: reading whole tensors by path, whoever wrote them, filling a
// module from them, and writing a file of weights.
//
//   const auto source = ds::checkpoint::open("checkpoints/global_step1000");   // ours, DeepSpeed's, Hugging Face's
//   ds::checkpoint::load_module(*source, *model);
//
// A Source owns the files it has opened; tensors that it returns are the caller's. Not thread safe. Every error of a
// file is an IoError that names file and tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ds::checkpoint {

struct TrainingState;  // what a checkpoint keeps beside tensors; the engine reads it

// Paths of tensors. `name` is that of a parameter or buffer in the module; a tied parameter goes under its first name.
std::string weight_path(const std::string& name);                           // "weights/h.0.ln_1.weight"
std::string buffer_path(const std::string& name);                           // "buffers/bn.running_mean"
std::string state_path(const std::string& state, const std::string& name);  // "optimizer/exp_avg/h.0.ln_1.weight"
std::string rank_path(int rank, const std::string& name);                   // "ranks/3/rng.cpu": of one rank alone
// The name behind the given folder of paths, or empty: name_in("weights/", "weights/h.0.b") == "h.0.b".
std::string name_in(const std::string& folder, const std::string& path);

// What is known of a tensor before it is read.
struct TensorInfo {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool frozen = false;  // a weight that was not trained

  int64_t numel() const;
  bool operator==(const TensorInfo&) const = default;
};

// Logical (whole) tensors by path, read in parts, so that any layout can be filled from any other.
class Source {
 public:
  virtual ~Source() = default;
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // The folder (or file) it reads, for messages.
  virtual const std::string& location() const = 0;
  virtual const TrainingState& state() const = 0;
  // All tensors by their paths. Weights that were trained are float32 masters where the writer had them.
  virtual const std::map<std::string, TensorInfo>& tensors() const = 0;
  // Further names of tied parameters -> the name they are stored under.
  virtual const std::map<std::string, std::string>& aliases() const = 0;
  // Reads elements [offset, offset + destination.numel()) of the flattened tensor into `destination`, which is
  // contiguous, on the CPU and may have any dtype (values are converted).
  virtual void read(const std::string& path, int64_t offset, const at::Tensor& destination) = 0;

  bool contains(const std::string& path) const { return tensors().contains(path); }
  // Throws IoError when there is none.
  const TensorInfo& info(const std::string& path) const;
  // The whole tensor, in its own dtype.
  at::Tensor tensor(const std::string& path);
};

// Opens whatever checkpoint a folder holds.
// `folder`: one tag (<save_dir>/<tag>) in dsengine's format or DeepSpeed's (stages 0 to 3), a folder of model weights
// in Hugging Face's layout (model.safetensors, or shards with model.safetensors.index.json), or a file as
// open_weights() takes. Throws IoError saying what was looked for and what is there.
std::unique_ptr<Source> open(const std::string& folder);

// Opens model weights in safetensors files, one file or a folder in Hugging Face's layout, or in a file of torch.save.
//
// `path`: a file that torch.save(model.state_dict(), path) of Python or torch::save(model, path) of LibTorch has
// written
// (.pt, .pth, .bin; torch 1.6 or newer; read as data, nothing in it is run), a .safetensors file, or a folder with
// model.safetensors, or with model.safetensors.index.json ({"weight_map":
// {tensor: file}}) and the files it names; a folder with both is read as the single file, as Hugging Face does. Every
// tensor is a weight (the files do not tell buffers apart); aliases() are those that safetensors' save_model() notes in
// the metadata, state() is empty. Files are mapped, so only what is read is loaded.
//
// Throws IoError naming folder, file and tensor: nothing to read, a file of the index that is missing, a tensor that is
// in the index and not in its file or the other way round, or in two files.
std::unique_ptr<Source> open_weights(const std::string& path);

// The file that a folder of weights has.
inline constexpr const char* kWeightFile = "model.safetensors";

// Copies weights and buffers into the module's own tensors, of any dtype and device, one at a time. `strict`: throws
// UsageError that lists parameters and buffers which only one of the two has; otherwise they are left as they are.
// Shapes that differ are always an error, found before anything is changed.
void load_module(Source& source, torch::nn::Module& module, bool strict = true);

// Writes all tensors, of any device, into one safetensors file, or leaves `path` untouched. `metadata`: texts for its
// header, {"format", "pt"} for instance. Throws UsageError for a dtype that the format lacks and a name given twice.
void write_weights(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const std::map<std::string, std::string>& metadata = {});

}  // namespace ds::checkpoint
