#include <ATen/ops/amax.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/sum.h>

#include "parallel/axis/collectives.h"
#include "parallel/axis/conversions.h"
#include "parallel/rules/dtypes.h"
#include "parallel/rules/lookup.h"
#include "parallel/rules/rules.h"
#include "parallel/rules/softmax_parts.h"

namespace ds::parallel {

SoftmaxParts softmax_parts(const Call& call, const Operand& x, int64_t dim) {
  SoftmaxParts result;
  const at::Tensor values = x.tensor.to(wide_type(x.tensor.scalar_type()));
  const at::Tensor greatest = all_reduce_max(at::amax(values.detach(), dim, /*keepdim=*/true), *call.axis());
  result.shifted = values - greatest;
  result.exponentials = at::exp(result.shifted);
  result.own_sum = at::sum(result.exponentials, dim, /*keepdim=*/true);
  return result;
}

namespace {

// layer_norm(input, shape, weight, bias, ...) and rms_norm(input, shape, weight, ...), over dimensions that are whole
Outcome normalize_last(Call& call) {
  const Operand x = call.operand(0);
  const auto normalized = static_cast<int64_t>(call.argument(1).toIntVector().size());
  if (!x.is_split() || x.cut->dim >= x.dim() - normalized || elements_of(x.sizes) == 0) return Outcome::kJoin;
  for (size_t i = 2; i < call.arguments(); ++i) {
    const Operand parameter = call.operand(i);
    if (parameter.defined()) call.set(i, for_parts(parameter, call.axis()));
  }
  call.set(0, x.tensor);
  call.run();
  call.result() = call.split(call.result().toTensor(), *x.cut, x.sizes);
  return Outcome::kDone;
}

// Operators of (self, dim, ...) that keep the shape, along a dimension that is whole.
Outcome along_whole_dim(Call& call) {
  const Operand x = call.operand(0);
  if (!x.is_split() || !call.argument(1).isInt()) return Outcome::kJoin;
  if (wrapped_dim(call.argument(1).toInt(), x.dim()) == x.cut->dim) return Outcome::kJoin;
  call.set(0, x.tensor);
  call.run();
  call.result() = call.split(call.result().toTensor(), *x.cut, x.sizes);
  return Outcome::kDone;
}

// softmax.int(self, dim, dtype) and log_softmax.int, also along the cut: the greatest and the sum come from all ranks.
Outcome softmax(Call& call) {
  Operand x = call.operand(0);
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), x.dim());
  if (!x.is_split() || dim != x.cut->dim) return along_whole_dim(call);
  if (elements_of(x.sizes) == 0 || !every_rank_has_some(call, x)) return Outcome::kJoin;
  if (!call.argument(2).isNone()) {
    x.tensor = x.tensor.to(call.argument(2).toScalarType());
  } else if (x.tensor.is_cuda()) {
    x.tensor = widened_by_autocast(x.tensor);  // on its list on GPUs alone
  }
  if (!x.tensor.is_floating_point()) return Outcome::kJoin;
  const SoftmaxParts parts = softmax_parts(call, x, dim);
  const at::Tensor sum = used_in_part(summed(parts.own_sum, call.axis()), call.axis());
  const at::Tensor result = call.name() == "aten::softmax" ? parts.exponentials / sum : parts.shifted - at::log(sum);
  return call.finish_split(result.to(x.tensor.scalar_type()), *x.cut, x.sizes);
}

// Joined as it is, not what it is made of: a layer of convert_sync_batchnorm is known by this operator's tensors.
Outcome batch_norm(Call& /*call*/) { return Outcome::kJoin; }

}  // namespace

void add_normalization_rules(RuleTable& table) {
  table["aten::batch_norm"] = batch_norm;
  table["aten::_batch_norm_impl_index"] = batch_norm;
  table["aten::layer_norm"] = normalize_last;
  table["aten::rms_norm"] = normalize_last;
  table["aten::softmax.int"] = softmax;
  table["aten::log_softmax.int"] = softmax;
  table["aten::_softmax"] = along_whole_dim;
  table["aten::_safe_softmax"] = along_whole_dim;  // of attention with dropout
  table["aten::_log_softmax"] = along_whole_dim;
  table["aten::cumsum"] = along_whole_dim;
  table["aten::cumprod"] = along_whole_dim;
}

}  // namespace ds::parallel
