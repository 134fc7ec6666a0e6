// The implementation of ReplicatedModel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/making_process.h"
#include "dsengine/comm.h"
#include "dsengine/distributed_data_parallel.h"
#include "loops/backward_pass.h"
#include "loops/comm_hooks.h"
#include "loops/renormed_tables.h"
#include "loops/used_parameters.h"
#include "model/state/model_layout.h"
#include "zero/parameter_bucket.h"
#include "zero/reduction/gradient_reducer.h"

namespace ds::loops {

struct ReplicatedModel::Impl {
  Impl(std::shared_ptr<torch::nn::Module> model, const DistributedDataParallelOptions& given);

  // --- a backward pass, on autograd's thread -----------------------------------------------------------------------
  void begin_backward();
  void end_backward();
  void show_gradients(const std::vector<char>& used);
  // Ends a pass that reduces, on all ranks: tables with max_norm get the rows shortened that any rank has looked up.
  // `has_pass`: false for a rank in join(), which makes no steps any more.
  void share_rows(bool has_pass = true);
  // Throws UsageError for parameters that were added, replaced, converted or made trainable since the start.
  void require_same_module() const;
  // Gives the values rank `root`'s.
  void take_values(const std::vector<zero::Parameter>& of, int root, const char* what);
  void follow_buffers(int root);
  // The group of BatchNorm layers that were converted without one; null: none were.
  std::shared_ptr<comm::Communicator> norms;

  // --- join(): ranks without batches --------------------------------------------------------------------------------
  // Agrees which ranks have a backward pass now; `own`: whether this one has. Collective. Throws UsageError where the
  // options say so.
  void agree_on_passes(bool own);
  // Takes part in the others' backward passes, until there are none. Returns whether there was none.
  bool shadow_passes();
  void shadow_pass();
  int last_rank_with_pass() const;

  // --- start ---------------------------------------------------------------------------------------------------------
  void require_device() const;
  void require_same_on_all_ranks() const;
  void make_reducer();

  MakingProcess process;
  std::shared_ptr<torch::nn::Module> module;
  DistributedDataParallelOptions options;
  engine::ModelParameters parameters;
  std::vector<const void*> identities;   // the module's parameters, in its order
  std::vector<at::TensorOptions> kinds;  // dtype and device of the trainable ones
  std::shared_ptr<comm::Communicator> group;
  std::vector<zero::ParameterBucket> buckets;
  std::vector<RenormedTable> renormed;  // none with one rank
  UsedParameters used;
  HookedReduction hooked;
  BackwardPass pass;
  std::unique_ptr<zero::GradientReducer> reducer;

  int64_t passes = 0;      // begun
  int64_t reductions = 0;  // passes that reduced
  int no_sync_scopes = 0;
  bool reduces = false;  // the running pass, or the last one
  bool has_hook = false;
  bool called_forward = false;  // the wrapper's, since the last pass that reduced
  bool joining = false;
  JoinOptions join_options;
  std::vector<int64_t> with_pass;  // for each rank: it has a pass now (1) or none (0)
};

}  // namespace ds::loops
