// engine::initialize: what it takes, what it returns. Include dsengine/engine.h, which has the Engine.
//
// Everything that is given is shared with the program, or copied. Called on the thread that will train, by every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/data_loader.h"
#include "dsengine/device_mesh.h"
#include "dsengine/init_distributed.h"
#include "dsengine/lr_scheduler.h"
#include "dsengine/optimizer.h"
#include "dsengine/parallel.h"
#include "dsengine/zero.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace ds::engine {

class Engine;

// Parameters with hyper-parameters of their own. A parameter in no group belongs to a group with the config's values,
// which comes first.
struct ParameterGroup {
  // Dotted names of parameters; "*" stands for any text at any place ("*bias*", "h.*.weight").
  std::vector<std::string> parameters;
  std::optional<double> lr;            // empty: the config's
  std::optional<double> weight_decay;  // likewise
  bool non_freeze = false;             // OneBitAdam: reduced as it is, not compressed, after the freeze too
  // OneBitAdam, OneBitLamb, ZeroOneAdam: 0 or false where the momentum shall stay 0 after the freeze (rows of a
  // position embedding that no sequence reaches: 1 bit has no zero). Of a shape that broadcasts to that of each
  // parameter of the group; undefined: nowhere.
  at::Tensor exp_avg_mask;
};

// Fields are set by name, and only two are needed: {.model = model.ptr(), .config = "ds_config.json"}.
struct InitializeOptions {
  // What is trained: any module (of a holder: holder.ptr()), or a pipeline::PipelineModule.
  std::shared_ptr<torch::nn::Module> model;
  // A path, a nlohmann::json object, or url-safe base64 of the JSON text.
  config::ConfigSource config;
  // A client optimizer over the model's parameters; overrides the config's. Its groups get this rank's slices in the
  // place of the parameters: one that updates each element by itself, as torch's SGD, Adam, AdamW, RMSprop and Adagrad,
  // works at every stage and precision (docs/from_libtorch.md). Without one, and without the section "optimizer" in the
  // config, the engine evaluates only: all parameters are frozen as long as it lives, there are no gradients and
  // states, and backward() and step() throw UsageError.
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  // Parameters with a learning rate or weight decay of their own.
  std::vector<ParameterGroup> parameter_groups;
  // With a tensor axis (tensor_parallel.autotp_size, or the mesh's): which parameters are split over it
  // (docs/tensor_parallel.md). The same on every rank. Ranks of the axis get the same batches.
  std::vector<parallel::SplitRule> split;
  // Any torch::data dataset with get(size_t) -> torch::data::Example<>, also a mapped one:
  // MNIST(folder).map(Normalize<>(0.13, 0.31)).map(Stack<>()).
  TrainingData training_data;
  // Overrides the config's scheduler: step number k = 0, 1, ... -> factor on the group's lr.
  std::function<double(int64_t)> lr_scheduler;
  // Under which the model was built, on every rank. Its group of ranks is used, if none is given. Outlives
  // initialize().
  zero::Init* init = nullptr;
  // A file with the parameters' first values, by name: .safetensors, a .pt of torch::save(model, path) or of Python's
  // torch.save(model.state_dict(), path), or a folder in Hugging Face's layout; empty: the module has them. A model
  // whose tensors are on the meta device needs it. Given on every rank, opened by rank 0 alone.
  std::string weights;
  // What engine::init_distributed returned; else the environment decides (docs/communication.md).
  std::optional<Distributed> distributed;
  // Or an existing group of ranks (tests, embedding).
  std::shared_ptr<comm::Communicator> communicator;
  // Or a grid of ranks. Its axes "pipe" and "tensor" are to agree with pipeline.stages and tensor_parallel.autotp_size,
  // where the config has these; "sequence" longer than one is refused.
  std::shared_ptr<comm::DeviceMesh> mesh;
  // "auto", "cpu", "cuda" or "cuda:N"; the model is moved there. "auto": cuda where a GPU is visible to this process,
  // else cpu; ConfigError where one is visible and cannot be used. Empty: that of `distributed`; "cpu" with
  // `communicator`, `mesh` or `init`, whose ranks have met for a device of the program's; else "auto".
  std::string device;
  // Rendezvous: "env://" (default), "tcp://host:port", "file:///path".
  std::string init_method = "env://";
  // Of every wait for other ranks.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // Seeds LibTorch's generators with the key "seed" of the config + rank. False: they go on as the program has left
  // them, and it is for the program to draw different numbers on different ranks.
  bool seed_generators = true;
  // What "auto" in the config may take its value from.
  config::AutoValues auto_values;
};

// The engine outlives the others: they refer to its buckets and its group of ranks.
struct Initialized {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<optimizers::ShardOptimizer> optimizer;  // null with a client optimizer, and without any
  std::shared_ptr<DataLoader> loader;                     // null without training_data
  std::shared_ptr<LrScheduler> schedule;                  // null without a scheduler
};

// Reads the config, joins the process group (environment of ds-launch; alone without it), lays the parameters into
// buckets, broadcasts them from rank 0 and returns the parts. Throws ConfigError with every mistake of the config,
// CommError when ranks do not come together or disagree on config or parameters.
Initialized initialize(const InitializeOptions& options);

}  // namespace ds::engine
