// Which modules of this thread are sharded, and as what: by themselves, or as units of one around them.
//
// Note [Who keeps a sharded module]
// fully_shard() shards at once, so that a module is sharded whatever comes next. Where a module around it follows, the
// inner ones end, and their slices are taken over, bucket by bucket, into that one's layout as its units. A unit's
// result is usually dropped, as in FSDP2's tutorial: until a module around it follows, or somebody has used the result,
// the list of this thread keeps it. The outermost one is kept by its result, which has been used (somebody has taken
// its parameters or its state, or has run it through the result).
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/fully_shard.h"
#include "loops/sharded_model.h"

namespace ds::loops {

class ShardUnit {
 public:
  // Shards the module. Throws as ds::fully_shard().
  static std::shared_ptr<ShardUnit> make(const std::shared_ptr<torch::nn::Module>& module,
                                         const FullyShardOptions& options);
  ShardUnit(std::shared_ptr<torch::nn::Module> module, FullyShardOptions options)
      : module_(std::move(module)), options_(std::move(options)) {}

  const torch::nn::Module& module() const { return *module_; }
  // The one that it is a part of; between passes. Throw UsageError where that has ended, or a pass runs. `call`: whose.
  ShardedModel& model_in_pass(const char* call) const;
  ShardedModel& model(const char* call) const;
  // What has its parameters in it.
  std::vector<size_t> buckets(const char* call) const { return model_in_pass(call).buckets_of(*module_); }
  const FullyShardOptions& options() const { return options_; }
  // The program has its slices or its state, or runs it.
  void note_use() { used_ = true; }
  ShardedModel& use(const char* call) {
    ShardedModel& used = model(call);
    note_use();
    return used;
  }
  // Its result has gone.
  void dropped() const;

 private:
  void unlist() const;

  std::shared_ptr<torch::nn::Module> module_;
  FullyShardOptions options_;
  std::shared_ptr<ShardedModel> own_;              // null: it is part of another one
  std::weak_ptr<ShardedModel> outer_;              // of that one
  std::vector<std::shared_ptr<ShardUnit>> inner_;  // in the order of their calls
  bool used_ = false;
};

}  // namespace ds::loops
