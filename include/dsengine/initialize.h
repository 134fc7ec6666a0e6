// engine::initialize: what it takes, what it returns. Include dsengine/engine.h, which has the Engine.
//
// The engine shares with the program what it is given as a shared_ptr, and the dataset; it copies all other options.
// Every rank calls it on the thread that will train.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/checkpoint.h"
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/data_loader.h"
#include "dsengine/device_mesh.h"
#include "dsengine/ema.h"
#include "dsengine/init_distributed.h"
#include "dsengine/optimizer.h"
#include "dsengine/parallel.h"
#include "dsengine/zero.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class LRScheduler;
class Optimizer;
}  // namespace torch::optim

namespace ds::engine {

class Engine;

// Parameters with hyper-parameters of their own. A parameter in no group belongs to a group with the config's values,
// which comes first.
struct ParameterGroup {
  // Dotted names of parameters; "*" stands for any text at any place ("*bias*", "h.*.weight"). A tied parameter is
  // meant by any of its names; two groups that name it by different ones are an error.
  std::vector<std::string> parameters;
  std::optional<double> lr;            // empty: the config's
  std::optional<double> weight_decay;  // empty: the config's
  bool non_freeze = false;             // OneBitAdam: gradients are reduced uncompressed, after the freeze too
  // OneBitAdam, OneBitLamb, ZeroOneAdam: marks with 0 or false the elements whose momentum has to stay 0 after the
  // freeze, for example rows of a position embedding that no sequence reaches: the 1-bit code has no zero and would
  // move them. Its shape broadcasts to that of each parameter of the group. Undefined: the momentum may move
  // everywhere.
  at::Tensor exp_avg_mask;
};

// The argument of initialize(). Fields are set by name, and two are needed: {.model = model.ptr(), .config =
// "ds_config.json"}.
struct InitializeOptions {
  // The module to train: any module (holder.ptr() of a module holder), or a pipeline::PipelineModule. Its parameters
  // get other memory. Two trained ones that are different tensors over one memory are a UsageError that names both:
  // register one tensor under both names. It is a warning if a buffer, a kept detach() or view, or from_blob() without
  // a deleter holds a parameter's memory. Raw pointers are not detected.
  std::shared_ptr<torch::nn::Module> model;
  // A path, a nlohmann::json object, or url-safe base64 of the JSON text.
  config::ConfigSource config;
  // A client optimizer over the model's parameters, which replaces the config's. The engine replaces the parameters in
  // its groups by this rank's slices of them, except for an optimizer that needs full parameters, which works at stage
  // 0 in float32. An optimizer that updates each element by itself, as torch's SGD, Adam, AdamW, RMSprop and Adagrad,
  // works at every stage and precision (docs/from_libtorch.md). Without a client optimizer and without the section
  // "optimizer" in the config, the engine evaluates only: all parameters are frozen as long as it lives, there are no
  // gradients and states, and backward() and step() throw UsageError.
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  // Makes the client optimizer, in the place of .optimizer, once the layers of a pipeline::PipelineModule are built:
  // over the parameters that `model` has on this rank, those of its stages. Every rank makes the same class with the
  // same groups and options; a group may be empty on some. Excludes .torch_scheduler.
  std::function<std::shared_ptr<torch::optim::Optimizer>(torch::nn::Module& model)> make_optimizer;
  // Parameters with a learning rate or weight decay of their own.
  std::vector<ParameterGroup> parameter_groups;
  // Which parameters are split over the tensor axis (tensor_parallel.autotp_size, or the mesh's), equal on every rank
  // (docs/tensor_parallel.md). Ranks of the axis get the same batches.
  std::vector<parallel::SplitRule> split;
  // With sequence_parallel_size: whether the program's model computes on pieces of sequences and cuts its batches
  // (dsengine/sequence_parallel.h). False: the model is unmodified, and engine->forward(model, inputs...) cuts them.
  bool cuts_sequences = false;
  // Samples for the engine's loader: any torch::data dataset with get(size_t) -> torch::data::Example<>, mapped or not:
  // MNIST(folder).map(Normalize<>(0.13, 0.31)).map(Stack<>()).
  TrainingData training_data;
  // How the loader reads them: .loading = {.reading = {.num_workers = 4}} (docs/data.md).
  LoadingOptions loading;
  // Replaces the config's scheduler: maps step number k = 0, 1, ... to a factor on the group's lr.
  std::function<double(int64_t)> lr_scheduler;
  // Replaces the config's scheduler: a scheduler of torch's over .optimizer, as torch::optim::StepLR, that has not
  // stepped. The engine alone calls its step(), once here, as Python's constructors do, and then after each applied
  // step. So a StepLR falls as Python's does, one step before LibTorch's. Checkpoints keep its place. A class of
  // the program's must compute its rates from its number of steps and the previous rates alone, because the engine goes
  // back to an earlier step by stepping again from the first one.
  std::shared_ptr<torch::optim::LRScheduler> torch_scheduler;
  // The exponential moving average of the weights that the engine keeps: .ema = {.decay = 0.999}. With decay 0 it
  // keeps none. ConfigError where offload_optimizer keeps masters in files, and with ZeroOneAdam.
  EmaOptions ema;
  // The zero::Init scope in which the model was built, on every rank; null: none. Its ranks are the job's where none of
  // distributed, communicator and mesh is given. Must outlive initialize().
  zero::Init* init = nullptr;
  // A file with the parameters' first values, by name: .safetensors, a .pt of torch::save(model, path) or of Python's
  // torch.save(model.state_dict(), path), or a folder in Hugging Face's layout; empty: the module's values. A model
  // whose tensors are on the meta device needs it. Every rank gives the path; the first rank of each data-parallel
  // group opens it.
  std::string weights;
  // How that file meets the model: what it may lack, adapters over it, grown tables (docs/checkpoints.md).
  WeightsOptions weights_options;
  // The ranks of the job, as the result of engine::init_distributed. At most one of distributed, communicator and mesh
  // is given; with none of them the environment of the process decides (docs/communication.md).
  std::optional<Distributed> distributed;
  // The ranks of the job, as an existing group (tests, embedding).
  std::shared_ptr<comm::Communicator> communicator;
  // The ranks of the job, as a grid. Its axis "pipe" must equal pipeline.stages (1 where neither config nor
  // PipelineOptions has it), its axes "tensor" and "sequence" tensor_parallel.autotp_size and sequence_parallel_size
  // where the config has these.
  std::shared_ptr<comm::DeviceMesh> mesh;
  // "auto", "cpu", "cuda" or "cuda:N"; the model is moved there. "auto": cuda where a GPU is visible to this process,
  // else cpu; ConfigError where a GPU is visible and cannot be used. Empty: the device of `distributed`; "cpu" with
  // `communicator`, `mesh` or `init`, whose ranks have met for a device of the program's choice; else "auto".
  std::string device;
  // How ranks meet: "env://" (default), "tcp://host:port" or "file:///path"; not used with distributed, communicator,
  // mesh or init.
  std::string init_method = "env://";
  // The limit of every wait for other ranks; not used with distributed, communicator, mesh or init.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // Whether to seed LibTorch's generators, with the config's key "seed" plus the rank's number; ranks of one tensor
  // axis share a number and draw alike. False: they go on as the program has left them, and the program sees to it that
  // ranks draw different numbers.
  bool seed_generators = true;
  // Values for keys that the config leaves "auto".
  config::AutoValues auto_values;
};

// The result of initialize(). The engine must outlive the others, which refer to its buckets and its ranks.
struct Initialized {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<optimizers::ShardOptimizer> optimizer;  // null with a client optimizer, and without any
  std::shared_ptr<DataLoader> loader;                     // null without training_data
  std::shared_ptr<LrScheduler> schedule;                  // null without a scheduler
};

// Reads the config, joins the ranks of the job (by the environment of ds-launch; without it the process is alone), lays
// the parameters into buckets, broadcasts them from rank 0 and makes the engine. Throws ConfigError with every mistake
// of the config, UsageError for a model or options that cannot be trained, IoError for .weights, CommError when ranks
// do not come together or disagree on config or parameters.
Initialized initialize(const InitializeOptions& options);

// What parity_check() trains: a model that is made anew, and the loss of a micro-batch. `micro_batch` counts over all
// data-parallel ranks and steps, and says what the batch is: one of the ranks takes it, or the one rank that stands for
// all of them.
struct ParityProgram {
  InitializeOptions options;
  std::function<at::Tensor(int64_t micro_batch)> loss;
};

// Whether both runs have trained the same, and where they part first, with the likely cause: one line.
struct ParityReport {
  bool equal = false;
  std::string text;
};

// Trains `steps` steps on the ranks of the job, the same with the micro-batches of each step in another order, and
// then, on rank 0 alone, on one rank at stage 0 with the same global batches. Compares losses, gradients and weights,
// with bounds from the second run: `ds-launch parity` in a program's own tests (docs/is_my_run_right.md). `make` is
// called for each run, in the last on rank 0 alone, so it calls no collective. All calls make a model of one structure;
// the later ones get the start values of the first. The ranks of the job share a temporary folder. The report is the
// same on all ranks. Throws what initialize() and the steps throw, and UsageError for pipelines and zero::Init.
ParityReport parity_check(const std::function<ParityProgram()>& make, int64_t steps = 3);

}  // namespace ds::engine
