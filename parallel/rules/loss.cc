#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <utility>

#include "parallel/axis/conversions.h"
#include "parallel/rules/dtypes.h"
#include "parallel/rules/lookup.h"
#include "parallel/rules/rules.h"
#include "parallel/rules/softmax_parts.h"

namespace ds::parallel {
namespace {

// Targets that are class numbers, one for each row of [rows, classes].
struct ClassLoss {
  Operand scores, target;
  int64_t reduction;
  int64_t ignored;
  double smoothing;
};

bool is_class_loss(const Call& call, const ClassLoss& loss) {
  return loss.scores.dim() == 2 && loss.target.dim() == 1 && loss.target.sizes[0] == loss.scores.sizes[0] &&
         !call.given(2).defined() && elements_of(loss.scores.sizes) > 0 && loss.scores.tensor.is_floating_point() &&
         loss.target.tensor.scalar_type() == at::kLong;
}

// `losses` of rows, 0 where `kept` is false; both plain.
at::Tensor reduce_rows(const at::Tensor& losses, const at::Tensor& kept, int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  const at::ScalarType wide = wide_type(losses.scalar_type());
  const at::Tensor sum = losses.sum(wide);
  if (reduction == at::Reduction::Sum) return sum.to(losses.scalar_type());
  return (sum / kept.sum().to(wide)).to(losses.scalar_type());
}

// Scores of classes are cut (Megatron-LM, section 3). With z the greatest score, S the sum of exp(x - z) and t the
// target's x - z: the loss is log S - t, smoothed by a, log S - (1 - a) t - a mean(x - z), over all classes. Ranks
// exchange the greatest, and the sums in one collective.
Outcome class_loss_of_parts(Call& call, const ClassLoss& loss) {
  const std::optional<DimRange> range = own_range(call, loss.scores);
  if (!range || loss.target.is_split() || !every_rank_has_some(call, loss.scores)) return Outcome::kJoin;
  const at::Tensor kept = loss.target.tensor.ne(loss.ignored);
  require_in_range(loss.target.tensor, loss.scores.sizes[1], kept.logical_not());
  const SoftmaxParts parts = softmax_parts(call, loss.scores, 1);
  const auto [own, elsewhere] = own_indices(loss.target.tensor, *range);
  const at::Tensor of_target = at::gather(parts.shifted, 1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  std::vector<at::Tensor> addends = {parts.own_sum.squeeze(1), of_target};
  if (loss.smoothing > 0) addends.push_back(parts.shifted.sum(1));
  const std::vector<at::Tensor> sums = summed(at::stack(addends), call.axis()).unbind(0);
  at::Tensor losses = at::log(sums[0]) - sums[1] * (1 - loss.smoothing);
  if (loss.smoothing > 0) {
    losses = losses - sums[2] * (loss.smoothing / static_cast<double>(loss.scores.sizes[1]));
  }
  losses = losses.masked_fill(kept.logical_not(), 0);
  return call.finish(reduce_rows(losses, kept, loss.reduction).to(loss.scores.tensor.scalar_type()));
}

// Rows are cut: each rank has the loss of its own.
Outcome class_loss_of_rows(Call& call, const ClassLoss& loss) {
  const Cut& cut = *loss.scores.cut;
  const at::Tensor target = call.part_as(loss.target, along(cut, 0));
  const at::Tensor own =
      at::cross_entropy_loss(loss.scores.tensor, target, {}, at::Reduction::None, loss.ignored, loss.smoothing);
  if (loss.reduction == at::Reduction::None) return call.finish_split(own, along(cut, 0), loss.target.sizes);
  at::Tensor sum = summed(own.sum(wide_type(own.scalar_type())), call.axis());
  if (loss.reduction == at::Reduction::Mean) {
    sum = sum / summed(target.ne(loss.ignored).sum(), call.axis()).to(sum.scalar_type());
  }
  return call.finish(sum.to(own.scalar_type()));
}

// cross_entropy_loss(scores, target, weight, reduction, ignore_index, label_smoothing)
Outcome cross_entropy(Call& call) {
  ClassLoss loss{.scores = call.operand(0),
                 .target = call.operand(1),
                 .reduction = call.argument(3).toInt(),
                 .ignored = call.argument(4).toInt(),
                 .smoothing = call.argument(5).toDouble()};
  if (!is_class_loss(call, loss) || !loss.scores.is_split()) return Outcome::kJoin;
  loss.scores.tensor = widened_by_autocast(loss.scores.tensor);
  return loss.scores.cut->dim == 1 ? class_loss_of_parts(call, loss) : class_loss_of_rows(call, loss);
}

// nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index), classes cut
Outcome negative_log_likelihood(Call& call) {
  ClassLoss loss{.scores = call.operand(0),
                 .target = call.operand(1),
                 .reduction = call.argument(3).toInt(),
                 .ignored = call.argument(4).toInt(),
                 .smoothing = 0};
  if (!is_class_loss(call, loss) || !loss.scores.is_split() || loss.scores.cut->dim != 1) return Outcome::kJoin;
  const std::optional<DimRange> range = own_range(call, loss.scores);
  if (!range || loss.target.is_split() || !every_rank_has_some(call, loss.scores)) return Outcome::kJoin;
  const at::Tensor kept = loss.target.tensor.ne(loss.ignored);
  require_in_range(loss.target.tensor, loss.scores.sizes[1], kept.logical_not());
  const auto [own, elsewhere] = own_indices(loss.target.tensor, *range);
  loss.scores.tensor = widened_by_autocast(loss.scores.tensor);
  const at::Tensor of_target = at::gather(loss.scores.tensor, 1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  const at::Tensor losses = -summed(of_target, call.axis()).masked_fill(kept.logical_not(), 0);
  return call.finish(reduce_rows(losses, kept, loss.reduction));
}

// mse_loss(self, target, reduction)
Outcome mean_square(Call& call) {
  if (call.given(0).sizes() != call.given(1).sizes()) return Outcome::kJoin;
  const at::Tensor squares = at::pow(widened_by_autocast(call.given(0)) - widened_by_autocast(call.given(1)), 2);
  const int64_t reduction = call.argument(2).toInt();
  if (reduction == at::Reduction::None) return call.finish(squares);
  return call.finish(reduction == at::Reduction::Sum ? squares.sum() : squares.mean());
}

}  // namespace

void add_loss_rules(RuleTable& table) {
  table["aten::cross_entropy_loss"] = cross_entropy;
  table["aten::nll_loss_nd"] = negative_log_likelihood;
  table["aten::mse_loss"] = mean_square;
}

}  // namespace ds::parallel
