#include <ATen/ops/rand.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/random_streams.h"
#include "core/replay/replayed_values.h"
#include "core/tensor_check.h"
#include "dsengine/efficiency.h"

namespace ds::efficiency {
namespace {

// [batch, r] along the tokens of x, as an index for gather() and scatter(): of x's rank and width.
at::Tensor index_of(const at::Tensor& positions, const at::Tensor& x, int64_t sequence_dim) {
  const at::Tensor placed = sequence_dim == 1 ? positions : positions.transpose(0, 1);
  return placed.unsqueeze(2).expand({placed.size(0), placed.size(1), x.size(2)});
}

void require_mask(const at::Tensor& mask) {
  require(mask.dim() == 4 && mask.size(2) == mask.size(3), "random_ltd: mask: expected [batch, heads, time, time], ",
          "found ", describe(mask));
}

}  // namespace

RandomLtd::RandomLtd(RandomLtdOptions options, uint64_t seed, int data_rank, TrainingStateSource state)
    : options_(std::move(options)), seed_(seed), data_rank_(data_rank), state_(std::move(state)) {
  require(options_.sequence_dim == 0 || options_.sequence_dim == 1, "random_ltd: sequence_dim: expected 0 or 1, found ",
          options_.sequence_dim);
}

int64_t RandomLtd::kept_tokens() const { return options_.kept.at(state_().optimizer_steps + 1); }

bool RandomLtd::drops_in(int64_t layer) const {
  return std::find(options_.layers.begin(), options_.layers.end(), layer) != options_.layers.end();
}

RandomLtd::Draw RandomLtd::draw(int64_t layer) {
  const bool training = ReplayTape::replayed([&] { return static_cast<int64_t>(state_().training); }) != 0;
  if (!training) return {.training = false, .step = 0, .run = 0};
  const int64_t step = ReplayTape::replayed([&] { return state_().optimizer_steps; });
  return {.training = true, .step = step, .run = ReplayTape::replayed([&] { return runs_.next(layer, state_()); })};
}

at::Tensor RandomLtd::positions_of(int64_t layer, const Draw& draw, const at::Tensor& x, int64_t kept) const {
  const int64_t batch = x.size(1 - options_.sequence_dim);
  const int64_t time = x.size(options_.sequence_dim);
  const at::Generator generator = generator_of({.seed = seed_,
                                                .step = draw.step,
                                                .micro_batch = draw.run,
                                                .purpose = "random-LTD",
                                                .coordinates = {layer, data_rank_}},
                                               x.device());
  const at::Tensor order =
      at::rand({batch, time}, generator, at::TensorOptions(at::kDouble).device(x.device())).argsort(int64_t{1});
  return std::get<0>(order.slice(1, 0, kept).sort(1));
}

at::Tensor RandomLtd::operator()(
    int64_t layer, const at::Tensor& x,
    const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& positions)>& function) {
  if (!drops_in(layer)) return function(x, {});
  const Draw now = draw(layer);
  if (!now.training) return function(x, {});
  require(x.defined() && x.dim() == 3, "random_ltd: layer ", layer, ": expected hidden states of three dimensions, ",
          "found ", describe(x));
  const int64_t kept = options_.kept.at(now.step + 1);
  if (kept >= x.size(options_.sequence_dim)) return function(x, {});
  const at::Tensor positions = positions_of(layer, now, x, kept);
  const at::Tensor index = index_of(positions, x, options_.sequence_dim);
  const at::Tensor tokens = x.gather(options_.sequence_dim, index);
  const at::Tensor out = function(tokens, positions);
  require(out.defined() && out.sizes() == tokens.sizes() && out.scalar_type() == x.scalar_type(), "random_ltd: layer ",
          layer, ": expected a result of its input's shape and dtype, ", describe(tokens), ", found ", describe(out));
  return x.scatter(options_.sequence_dim, index, out);
}

at::Tensor causal_mask_of(const at::Tensor& mask, const at::Tensor& positions) {
  if (!positions.defined()) return mask;
  require_mask(mask);
  return mask.slice(2, 0, positions.size(1)).slice(3, 0, positions.size(1));
}

at::Tensor padding_mask_of(const at::Tensor& mask, const at::Tensor& positions) {
  if (!positions.defined()) return mask;
  require_mask(mask);
  const int64_t batch = positions.size(0);
  const int64_t kept = positions.size(1);
  const int64_t heads = mask.size(1);
  const int64_t time = mask.size(3);
  const at::Tensor whole = mask.expand({batch, heads, time, time});
  const at::Tensor rows = positions.view({batch, 1, kept, 1}).expand({batch, heads, kept, time});
  const at::Tensor columns = positions.view({batch, 1, 1, kept}).expand({batch, heads, kept, kept});
  return whole.gather(2, rows).gather(3, columns);
}

}  // namespace ds::efficiency
