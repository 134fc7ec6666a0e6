// Units of a module around which fully_shard is called: each has ended, and its slices are still there. They are first
// values of the module's layout, so that no more than a bucket is whole at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/slices/segment.h"
#include "model/state/model_state.h"

namespace ds::loops {

class ShardedModel;

class EarlierUnits {
 public:
  // One that has ended.
  void add(std::shared_ptr<ShardedModel> unit);

  // Whether they have slices of a parameter, whose memory has gone then.
  bool have(const at::Tensor& parameter) const { return places_.contains(parameter.unsafeGetTensorImpl()); }
  // Its values, of trained ones the float32 ones, until the next call; undefined: they have none. Collective: ranks ask
  // for the same in the same order.
  at::Tensor value_of(const at::Tensor& parameter);
  // Whether one of them has never got values.
  bool await_values() const { return await_values_; }

 private:
  struct Place {
    const engine::ModelState* unit;
    size_t bucket;  // trained ones first, then frozen ones
    Segment segment;
  };
  void note(const engine::ModelState& unit, size_t bucket, const zero::ParameterBucket& of);

  std::vector<std::shared_ptr<ShardedModel>> units_;
  std::unordered_map<const void*, Place> places_;  // by parameter
  const engine::ModelState* whole_unit_ = nullptr;
  size_t whole_bucket_ = 0;
  at::Tensor whole_;  // of these
  bool await_values_ = false;
};

}  // namespace ds::loops
