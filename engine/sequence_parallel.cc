#include "dsengine/sequence_parallel.h"

#include <ATen/ops/constant_pad_nd.h>

#include <utility>

#include "core/check.h"
#include "core/tensor_check.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

Engine& engine_of_sequences(const std::shared_ptr<Engine>& engine) {
  require(engine != nullptr, "SequenceParallel: expected the engine that initialize() returned, found null");
  return *engine;
}

}  // namespace

SequenceParallel::SequenceParallel(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
  Engine::Impl& impl = EngineAccess::impl_of(engine_of_sequences(engine_));
  require(impl.cuts_sequences || impl.config.sequence_ranks() == 1, "SequenceParallel: expected an engine whose ",
          "program cuts its sequences: pass .cuts_sequences = true to initialize()");
  ranks_ = impl.state.ranks.mesh->group(comm::MeshAxis::kSequence);
  const config::SequenceParallelSection& section = impl.config.sequence_parallel;
  layout_.order = section.order == "zigzag" ? parallel::SequenceOrder::kZigzag : parallel::SequenceOrder::kContiguous;
  dimension_ = section.dimension;
}

at::Tensor SequenceParallel::shard(const at::Tensor& whole) const {
  require(whole.defined() && whole.dim() > dimension_, "SequenceParallel::shard: expected a tensor with a dimension ",
          dimension_, " (sequence_parallel.dimension), found ", ds::describe(whole));
  EngineAccess::impl_of(*engine_).shared_batches.note(whole);
  return parallel::shard_sequence(whole, *ranks_, dimension_, layout_);
}

at::Tensor SequenceParallel::shard_labels(const at::Tensor& tokens, int64_t ignored) const {
  require(tokens.defined() && tokens.dim() > dimension_ && !tokens.is_floating_point(),
          "SequenceParallel::", "shard_labels: expected tokens, integers with a dimension ", dimension_,
          " (sequence_parallel.dimension), found ", ds::describe(tokens));
  std::vector<int64_t> one_more(2 * static_cast<size_t>(tokens.dim() - dimension_), 0);
  one_more.back() = 1;
  return shard(at::constant_pad_nd(tokens.slice(dimension_, 1), one_more, ignored));
}

at::Tensor SequenceParallel::positions(int64_t length) const {
  return parallel::sequence_positions(length, *ranks_, layout_).to(engine_->device());
}

at::Tensor SequenceParallel::join(const at::Tensor& part) const {
  return parallel::join_sequence(part, *ranks_, dimension_, layout_);
}

at::Tensor SequenceParallel::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       parallel::SequenceAttentionOptions options) const {
  options.layout = layout_;
  const std::string& way = engine_->config().sequence_parallel.attention;
  const auto divides = [&](const at::Tensor& x) { return x.defined() && x.dim() == 4 && x.size(1) % size() == 0; };
  const bool ulysses = way == "ulysses" || (way == "auto" && divides(q) && divides(k));
  return ulysses ? parallel::ulysses_attention(q, k, v, *ranks_, options)
                 : parallel::ring_attention(q, k, v, *ranks_, options);
}

}  // namespace ds::engine
