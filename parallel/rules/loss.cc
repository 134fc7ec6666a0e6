#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log.h>
#include <ATen/ops/nll_loss_nd.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <functional>
#include <optional>
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
  Operand scores, target, weight;  // weight: of the classes; undefined: none
  int64_t reduction;
  int64_t ignored;
  double smoothing;
};

// Weights that are trained get a gradient of smoothed losses: those are left to joins.
bool has_fitting_weight(const ClassLoss& loss) {
  const Operand& weight = loss.weight;
  return !weight.defined() ||
         (weight.dim() == 1 && weight.sizes[0] == loss.scores.sizes[1] &&
          weight.tensor.scalar_type() == loss.scores.tensor.scalar_type() && !weight.tensor.requires_grad());
}

bool is_class_loss(const ClassLoss& loss) {
  return loss.scores.dim() == 2 && loss.target.dim() == 1 && loss.target.sizes[0] == loss.scores.sizes[0] &&
         elements_of(loss.scores.sizes) > 0 && loss.scores.tensor.is_floating_point() &&
         loss.target.tensor.scalar_type() == at::kLong && has_fitting_weight(loss);
}

// Both are on autocast's list.
void widen(ClassLoss& loss) {
  loss.scores.tensor = widened_by_autocast(loss.scores.tensor);
  if (loss.weight.defined()) loss.weight.tensor = widened_by_autocast(loss.weight.tensor);
}

at::Tensor kept_rows(const ClassLoss& loss, const at::Tensor& target) { return target.ne(loss.ignored); }

// Returns the weight of each row in a mean, with which its loss is multiplied: 0 where the row is ignored, else the
// weight of its class.
at::Tensor row_weights(const Call& call, const ClassLoss& loss, const at::Tensor& target) {
  at::Tensor kept = kept_rows(loss, target);
  if (!loss.weight.defined()) return kept;
  const at::Tensor weight = as_plain(loss.weight, call.axis());
  return at::index_select(weight, 0, target.masked_fill(kept.logical_not(), 0)).masked_fill(kept.logical_not(), 0);
}

// `losses` of rows, which count `weights` in a mean; both plain.
at::Tensor reduce_rows(const at::Tensor& losses, const at::Tensor& weights, int64_t reduction) {
  if (reduction == at::Reduction::None) return losses;
  const at::ScalarType wide = wide_type(losses.scalar_type());
  const at::Tensor sum = losses.sum(wide);
  if (reduction == at::Reduction::Sum) return sum.to(losses.scalar_type());
  return (sum / weights.sum(wide)).to(losses.scalar_type());
}

// Returns this rank's part of the weighted sum over classes, for each row.
at::Tensor smoothing_sums(const Call& call, const ClassLoss& loss, const at::Tensor& shifted) {
  if (!loss.weight.defined()) return shifted.sum(1);
  const at::Tensor weight = part_as(loss.weight, along(*loss.scores.cut, 0), call.axis());
  return (shifted * weight.to(shifted.scalar_type())).sum(1);
}

// Scores of classes are cut (Megatron-LM, section 3). With z the greatest score, S the sum of exp(x - z) and t the
// target's x - z: the loss is log S - t, smoothed by a, log S - (1 - a) t - a mean(x - z), over all classes; with
// weights w of the classes, (1 - a) w_t (log S - t) + a (mean(w) log S - mean(w (x - z))). Ranks exchange the greatest,
// and the sums in one collective.
Outcome class_loss_of_parts(Call& call, const ClassLoss& loss) {
  const std::optional<DimRange> range = own_range(call, loss.scores);
  if (!range || loss.target.is_split() || !every_rank_has_some(call, loss.scores)) return Outcome::kJoin;
  const at::Tensor kept = kept_rows(loss, loss.target.tensor);
  require_in_range(loss.target.tensor, loss.scores.sizes[1], kept.logical_not());
  const SoftmaxParts parts = softmax_parts(call, loss.scores, 1);
  const auto [own, elsewhere] = own_indices(loss.target.tensor, *range);
  const at::Tensor of_target = at::gather(parts.shifted, 1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  std::vector<at::Tensor> addends = {parts.own_sum.squeeze(1), of_target};
  const at::ScalarType wide = parts.shifted.scalar_type();
  if (loss.smoothing > 0) addends.push_back(smoothing_sums(call, loss, parts.shifted));
  const std::vector<at::Tensor> sums = summed(at::stack(addends), call.axis()).unbind(0);
  const at::Tensor log_sum = at::log(sums[0]);
  const at::Tensor weights = row_weights(call, loss, loss.target.tensor);
  at::Tensor losses = log_sum - sums[1];
  if (loss.weight.defined()) losses = losses * weights.to(wide);
  if (loss.smoothing > 0) {
    const auto classes = static_cast<double>(loss.scores.sizes[1]);
    const at::Tensor total =
        loss.weight.defined() ? log_sum * as_plain(loss.weight, call.axis()).to(wide).sum() : log_sum * classes;
    losses = losses * (1 - loss.smoothing) + (total - sums[2]) * (loss.smoothing / classes);
  }
  losses = losses.masked_fill(kept.logical_not(), 0);
  return call.finish(reduce_rows(losses, weights, loss.reduction).to(loss.scores.tensor.scalar_type()));
}

// Rows are cut: each rank has the loss of its own.
Outcome class_loss_of_rows(Call& call, const ClassLoss& loss) {
  const Cut& cut = *loss.scores.cut;
  const at::Tensor target = part_as(loss.target, along(cut, 0), call.axis());
  const at::Tensor weight = loss.weight.defined() ? as_plain(loss.weight, call.axis()) : at::Tensor();
  const std::optional<at::Tensor> given_weight = weight.defined() ? std::optional(weight) : std::nullopt;
  const at::Tensor own = at::cross_entropy_loss(loss.scores.tensor, target, given_weight, at::Reduction::None,
                                                loss.ignored, loss.smoothing);
  if (loss.reduction == at::Reduction::None) return call.finish_split(own, along(cut, 0), loss.target.sizes);
  at::Tensor sum = summed(own.sum(wide_type(own.scalar_type())), call.axis());
  if (loss.reduction == at::Reduction::Mean) {
    sum = sum / summed(row_weights(call, loss, target).sum(sum.scalar_type()), call.axis());
  }
  return call.finish(sum.to(own.scalar_type()));
}

std::optional<at::Tensor> optional_tensor(const Call& call, size_t i) {
  const at::Tensor tensor = call.given(i);
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// Scores of one row, [classes], or of more dimensions, [batch, classes, ...].
bool has_rows_elsewhere(const at::Tensor& scores, const at::Tensor& target) {
  if (scores.dim() == 1) return target.dim() == 0;
  return scores.dim() > 2 && target.dim() == scores.dim() - 1 && scores.numel() > 0;
}

// The loss of [rows, classes], in the target's shape where it is not reduced.
Outcome finish_rows(Call& call, const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& loss_of) {
  const at::Tensor scores = call.given(0);
  const at::Tensor target = call.given(1);
  const at::Tensor rows = scores.dim() == 1 ? scores.unsqueeze(0) : scores.movedim(1, -1).flatten(0, -2);
  const at::Tensor loss = loss_of(rows, target.reshape({-1}));
  return call.finish(loss.dim() == 0 ? loss : loss.view(target.sizes()));
}

// cross_entropy_loss(scores, target, weight, reduction, ignore_index, label_smoothing)
Outcome cross_entropy(Call& call) {
  const at::Tensor target = call.given(1);
  if (target.is_floating_point()) return Outcome::kNone;  // probabilities: composed of others
  if (has_rows_elsewhere(call.given(0), target)) {
    return finish_rows(call, [&](const at::Tensor& scores, const at::Tensor& targets) {
      return at::cross_entropy_loss(scores, targets, optional_tensor(call, 2), call.argument(3).toInt(),
                                    call.argument(4).toInt(), call.argument(5).toDouble());
    });
  }
  ClassLoss loss{.scores = call.operand(0),
                 .target = call.operand(1),
                 .weight = call.operand(2),
                 .reduction = call.argument(3).toInt(),
                 .ignored = call.argument(4).toInt(),
                 .smoothing = call.argument(5).toDouble()};
  if (!loss.scores.is_split()) return Outcome::kJoin;
  widen(loss);
  if (!is_class_loss(loss)) return Outcome::kJoin;
  return loss.scores.cut->dim == 1 ? class_loss_of_parts(call, loss) : class_loss_of_rows(call, loss);
}

// nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index), classes cut
Outcome negative_log_likelihood(Call& call) {
  if (has_rows_elsewhere(call.given(0), call.given(1))) {
    return finish_rows(call, [&](const at::Tensor& scores, const at::Tensor& targets) {
      return at::nll_loss_nd(scores, targets, optional_tensor(call, 2), call.argument(3).toInt(),
                             call.argument(4).toInt());
    });
  }
  ClassLoss loss{.scores = call.operand(0),
                 .target = call.operand(1),
                 .weight = call.operand(2),
                 .reduction = call.argument(3).toInt(),
                 .ignored = call.argument(4).toInt(),
                 .smoothing = 0};
  if (!loss.scores.is_split() || loss.scores.cut->dim != 1) return Outcome::kJoin;
  widen(loss);
  if (!is_class_loss(loss)) return Outcome::kJoin;
  const std::optional<DimRange> range = own_range(call, loss.scores);
  if (!range || loss.target.is_split() || !every_rank_has_some(call, loss.scores)) return Outcome::kJoin;
  const at::Tensor kept = kept_rows(loss, loss.target.tensor);
  require_in_range(loss.target.tensor, loss.scores.sizes[1], kept.logical_not());
  const auto [own, elsewhere] = own_indices(loss.target.tensor, *range);
  const at::Tensor of_target = at::gather(loss.scores.tensor, 1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
  at::Tensor losses = -summed(of_target, call.axis()).masked_fill(kept.logical_not(), 0);
  const at::Tensor weights = row_weights(call, loss, loss.target.tensor);
  if (loss.weight.defined()) losses = losses * weights.to(losses.scalar_type());
  return call.finish(reduce_rows(losses, weights, loss.reduction));
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
