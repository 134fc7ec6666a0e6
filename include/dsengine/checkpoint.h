// Checkpoints and weights in files: what Engine::save_checkpoint and Engine::load_checkpoint take and return, and,
// without an engine, reading full tensors whoever wrote them, filling a module from them, and writing a file of
// weights.
//
//   const auto source = ds::checkpoint::open("checkpoints/global_step1000");   // dsengine, DeepSpeed, Hugging Face
//   ds::checkpoint::load_module(*source, *model);
//
// Options and results are plain values that belong to the caller. A Source owns the files it has opened; tensors that
// it returns are the caller's. Not thread safe. Every error of a file is an IoError that names file and tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ds::engine {

// Full tensors of a model by name.
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;

// Options of save_checkpoint(save_dir, tag, options), which works like this:
//
// Each rank writes its part of the state to <save_dir>/<tag> (default tag: "global_step<N>"). The folder gets that name
// when it is complete and on the disk, not before. The call returns the folder's path. Collective. All hosts must see
// save_dir; with checkpoint.use_node_local_storage a host has a save_dir of its own, from which its ranks load again.
// When a rank cannot write, all throw (that rank the cause, the others IoError), and what was in save_dir before is
// untouched. Two engines that live in one program need a save_dir each: a tag that the other one has saved is a
// UsageError.
//
// An asynchronous save returns at once. The state is copied during the next forward and backward (the next update waits
// for the copy, which takes as much host memory as the rank's part), and a thread writes it. Until the next update,
// change trained parameters in scopes of gathered_parameters() only: these wait. One save is in flight at a time. A
// failure is logged by the next save and thrown by wait_for_checkpoint().
//
// Names and defaults of the options are DeepSpeed's, where it has them.
struct SaveOptions {
  nlohmann::json client_state = nlohmann::json::object();  // the program's own data; rank 0's is kept
  bool save_latest = true;                                 // <save_dir>/latest names this tag afterwards
  bool exclude_frozen_parameters = false;                  // leaves out weights that are not trained
  // Whether to save asynchronously; by default checkpoint.writer.decoupled of the config.
  std::optional<bool> asynchronous;
  // How many complete checkpoints stay in save_dir, those of the latest steps, this one among them; 0: all. Counted,
  // and removed with a line in the log, are those that this run, or the run that it goes on from, has saved with
  // keep_last. By default checkpoint.keep_last of the config, but 0 without save_latest.
  std::optional<int64_t> keep_last;
  // Tensors that each rank has for itself, by name: hidden states, a queue, a solver's field. On any device; other
  // ranks may have other names and shapes. They are copied before the call returns; load_checkpoint() gives them back.
  std::map<std::string, at::Tensor> rank_state = {};
};

// Options of load_checkpoint(load_dir, tag, options), which works like this:
//
// Goes on from <load_dir>/<tag>, written by any number of ranks at any stage, precision and offload, or by DeepSpeed.
// Without a tag it takes the one that `latest` names or, if that cannot be read, the complete one with the latest step,
// and logs an error. Where there is none, nothing is loaded and the result is empty. Collective, between optimizer
// steps.
// Throws UsageError where the checkpoint does not fit the model or the optimizer, before anything is changed. Throws
// IoError, naming file and tensor, where it is damaged; if that is found when part was loaded, the engine refuses to
// go on until a load succeeds.
struct LoadOptions {
  bool load_module_strict = true;        // parameters and buffers that only model or file has are an error
  bool load_optimizer_states = true;     // false: they keep their values
  bool load_lr_scheduler_states = true;  // false: the schedule stays where it is
  bool load_module_only = false;         // loads weights and buffers alone; a moving average begins with the weights
  // Gives each rank the SaveOptions::rank_state of its number. UsageError where the checkpoint has any and was saved
  // by another number of ranks, of pipeline stages or of tensor ranks. None is given where this is false or
  // load_module_only.
  bool load_rank_state = true;
};

// The result of load_checkpoint(); false where there was nothing to load.
struct LoadedCheckpoint {
  std::string path;                                        // the tag's folder; empty: there was none
  std::string tag;                                         // the folder's name
  nlohmann::json client_state = nlohmann::json::object();  // the object that was given to the save
  std::map<std::string, at::Tensor> rank_state = {};       // what this rank gave to the save, on the host
  explicit operator bool() const { return !path.empty(); }
};

// How the tensors of a file are matched with a model: options of InitializeOptions::weights, equal on every rank. "The
// module's own values" are those that its constructors have made on rank 0, also under zero::Init. Tensors on the meta
// device have none.
struct WeightsOptions {
  // True: a parameter that no file has is an error. False: it starts with the module's own values, and
  // Engine::start_weights() and a warning name it.
  bool strict = true;
  // Further files, for instance with adapters: a tensor is taken from the last file that has it.
  std::vector<std::string> over;
  // Parameters that may have more rows (a larger dimension 0) than the file, as a grown vocabulary: "wte.weight", or
  // with "*" for any text. The file's rows come first; those behind them are the module's own.
  std::vector<std::string> grow;
  // Maps a name in the model to the name in the files; none: they are the same. An empty result: the files are not
  // asked for the tensor, and it is no error that they lack it.
  std::function<std::string(const std::string& name)> rename;
  // Fills `values`, in place, with the elements that the files lack of a tensor on the meta device: all of them, or the
  // rows behind the file's. `values` is on the CPU, float32 (float64 for a float64 tensor), and NaN in all elements;
  // UsageError where one is left. The default generator is seeded before each call by the config's "seed" and the name,
  // and goes on afterwards as if nothing had been drawn, so that every layout and number of ranks begins with the same
  // values. The first rank of each data-parallel group calls it.
  std::function<void(const std::string& name, const at::Tensor& values)> fill;
};

// The names of the tensors that a file of weights and a model do not have in common.
struct WeightsReport {
  std::vector<std::string> missing;  // parameters and buffers of the model that the file lacks
  std::vector<std::string> grown;    // parameters of which the file has the first rows alone
  std::vector<std::string> unused;   // tensors of the file that the model lacks
};

// Options of Engine::save_weights().
struct SaveWeightsOptions {
  // Parameters and buffers: names, or with "*" for any text ("*.lora_*"); a tied parameter is meant by any of its names
  // and is written under all of them. Empty: all trained parameters.
  std::vector<std::string> names;
  // True: trained parameters are written as their float32 masters (float64 in a float64 model), without any loss.
  // False: all are written in the model's dtype.
  bool masters = true;
};

}  // namespace ds::engine

namespace ds::checkpoint {

struct TrainingState;  // the state that a checkpoint keeps beside tensors; the engine reads it

// Paths of tensors. `name` is the name of a parameter or buffer in the module; a tied parameter has its first name.
std::string weight_path(const std::string& name);                           // "weights/h.0.ln_1.weight"
std::string buffer_path(const std::string& name);                           // "buffers/bn.running_mean"
std::string state_path(const std::string& state, const std::string& name);  // "optimizer/exp_avg/h.0.ln_1.weight"
std::string ema_path(const std::string& name);  // "ema/h.0.ln_1.weight": the moving average of a trained weight
std::string rank_path(int rank, const std::string& name);        // "ranks/3/rng.cpu": data of one rank
std::string rank_state_path(int rank, const std::string& name);  // "ranks/3/state/queue": SaveOptions::rank_state
// Returns the name behind the given folder of paths, or an empty one: name_in("weights/", "weights/h.0.b") == "h.0.b".
std::string name_in(const std::string& folder, const std::string& path);

// Facts about a tensor that are known before it is read.
struct TensorInfo {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool frozen = false;  // a weight that was not trained

  int64_t numel() const;
  bool operator==(const TensorInfo&) const = default;
};

// Full tensors by path, read in parts, so that a model of any layout can be filled from a checkpoint of any other.
class Source {
 public:
  virtual ~Source() = default;
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // The folder or file that it reads, for messages.
  virtual const std::string& location() const = 0;
  // The state beside tensors, such as counters and the schedule; for the engine.
  virtual const TrainingState& state() const = 0;
  // All tensors by their paths. Trained weights are float32 masters where the checkpoint has masters.
  virtual const std::map<std::string, TensorInfo>& tensors() const = 0;
  // Maps each further name of a tied parameter to the name that it is stored under.
  virtual const std::map<std::string, std::string>& aliases() const = 0;
  // Reads elements [offset, offset + destination.numel()) of the flattened tensor into `destination`, which is
  // contiguous, on the CPU and may have any dtype (values are converted).
  virtual void read(const std::string& path, int64_t offset, const at::Tensor& destination) = 0;

  bool contains(const std::string& path) const { return tensors().contains(path); }
  // Returns what is known of one tensor. Throws IoError when there is none.
  const TensorInfo& info(const std::string& path) const;
  // Reads the full tensor, in its own dtype.
  at::Tensor tensor(const std::string& path);
};

// Opens a checkpoint in any of the formats below.
//
// `folder`: one tag (<save_dir>/<tag>) in dsengine's format or DeepSpeed's (stages 0 to 3), a folder of model weights
// in Hugging Face's layout (model.safetensors, or shards with model.safetensors.index.json), or a file as
// open_weights() takes. Throws IoError saying what was looked for and what is there.
std::unique_ptr<Source> open(const std::string& folder);

// Opens model weights in safetensors files, one file or a folder in Hugging Face's layout, or in a file of torch.save.
//
// `path` may be a file of torch.save(model.state_dict(), path) of Python or torch::save(model, path) of LibTorch (.pt,
// .pth, .bin; torch 1.6 or newer), or of torch.export.save (.pt2). It is read as data: nothing in it is run. `path` may
// also be a .safetensors file, or
// a folder with model.safetensors or model.safetensors.index.json ({"weight_map": {tensor: file}}) and the files it
// names. A folder with both is read as the single file, as Hugging Face does.
// Every tensor is a weight (the files do not tell buffers apart); aliases() are those that safetensors' save_model()
// notes in the metadata, state() is empty. Files are mapped, so only what is read is loaded.
//
// Throws IoError, naming folder, file and tensor, where there is nothing to read, a file of the index is missing, a
// tensor is in the index and not in its file or the other way round, or a tensor is in two files.
std::unique_ptr<Source> open_weights(const std::string& path);

// The name of the file in a folder of weights.
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
