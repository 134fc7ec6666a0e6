#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <string>
#include <utility>

#include "parallel/axis/collectives.h"
#include "parallel/axis/conversions.h"
#include "parallel/rules/dtypes.h"
#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

// Dimensions that a reduction leaves, and where the cut goes; no cut where it is among the reduced ones.
struct Reduced {
  Sizes sizes;
  std::optional<Cut> cut;
};

Reduced reduced(const Operand& x, const std::vector<int64_t>& dims, bool keep) {
  Reduced result;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const bool goes = std::find(dims.begin(), dims.end(), dim) != dims.end();
    if (dim == x.cut->dim && !goes) result.cut = along(*x.cut, static_cast<int64_t>(result.sizes.size()));
    if (!goes) result.sizes.push_back(x.sizes[dim]);
    if (goes && keep) result.sizes.push_back(1);
  }
  return result;
}

// Returns the dimensions that an argument names: one, a list, or all for no argument. Empty where one is out of range.
std::optional<std::vector<int64_t>> dims_of(const c10::IValue& value, const Operand& x) {
  std::vector<int64_t> dims;
  if (value.isInt()) dims = {value.toInt()};
  if (value.isIntList()) dims = value.toIntVector();
  if (dims.empty()) {
    for (int64_t dim = 0; dim < x.dim(); ++dim) dims.push_back(dim);
  }
  for (int64_t& dim : dims) {
    dim = wrapped_dim(dim, x.dim());
    if (dim < 0 || dim >= x.dim()) return std::nullopt;
  }
  return dims;
}

std::optional<at::ScalarType> dtype_of(const c10::IValue& value) {
  if (value.isNone()) return std::nullopt;
  return value.toScalarType();
}

// sum(self, dtype), sum.dim_IntList(self, dim, keepdim, dtype), and mean in the same forms: ranks add what they have.
Outcome add_up(Call& call) {
  const Operand x = call.operand(0);
  const bool with_dims = call.arguments() == 4;
  const auto dims = dims_of(with_dims ? call.argument(1) : c10::IValue(), x);
  if (!dims || elements_of(x.sizes) == 0) return Outcome::kJoin;
  const bool keep = with_dims && call.argument(2).toBool();
  std::optional<at::ScalarType> dtype = dtype_of(call.argument(call.arguments() - 1));
  const bool mean = call.name() == "aten::mean";
  // sum() is on autocast's list for float32 on GPUs.
  const bool widened = !mean && !dtype && is_narrow(x.tensor.scalar_type()) && x.tensor.is_cuda();
  if (widened && under_autocast(x.tensor)) dtype = at::kFloat;
  const at::ScalarType given = dtype.value_or(x.tensor.scalar_type());
  if (mean && !x.tensor.is_floating_point() && !dtype) return Outcome::kJoin;  // an error, as for plain tensors
  const Reduced left = reduced(x, *dims, keep);
  // A mean is made of a sum, too, which may be beyond float16.
  at::Tensor sum = at::sum(x.tensor, *dims, keep, is_narrow(given) ? std::optional(at::kFloat) : dtype);
  if (!left.cut) sum = summed(sum, call.axis());
  if (mean) {
    int64_t count = 1;
    for (const int64_t dim : *dims) count *= x.sizes[dim];
    sum = sum / static_cast<double>(count);
  }
  if (is_narrow(given)) sum = sum.to(given);
  return left.cut ? call.finish_split(sum, *left.cut, left.sizes) : call.finish(sum);
}

// Along dimensions that are whole; `dims` and `keep` are places of arguments.
Rule reduction(size_t dims_at, size_t keep_at) {
  return [dims_at, keep_at](Call& call) {
    const Operand x = call.operand(0);
    const auto dims = dims_of(call.argument(dims_at), x);
    if (!dims || elements_of(x.sizes) == 0) return Outcome::kJoin;
    const Reduced left = reduced(x, *dims, call.argument(keep_at).toBool());
    if (!left.cut) return Outcome::kJoin;
    call.set(0, x.tensor);
    call.run();
    for (size_t i = 0; i < call.results(); ++i) {
      call.result(i) = call.split(call.result(i).toTensor(), *left.cut, left.sizes);
    }
    return Outcome::kDone;
  };
}

// any(self), all(self), of booleans: whether a rank has one that is true, or none that is false.
Outcome find_any(Call& call) {
  const Operand x = call.operand(0);
  if (!x.is_split() || x.tensor.scalar_type() != at::kBool) return Outcome::kJoin;
  const bool any = call.name() == "aten::any";
  const at::Tensor own = any ? at::any(x.tensor) : at::all(x.tensor).logical_not();
  const at::Tensor found = all_reduce_max(own.to(at::kFloat), *call.axis()).gt(0);
  return call.finish(any ? found : found.logical_not());
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  for (const char* name : {"aten::sum", "aten::sum.dim_IntList", "aten::mean", "aten::mean.dim"}) table[name] = add_up;
  for (const char* name :
       {"amax", "amin", "logsumexp", "prod.dim_int", "argmax", "argmin", "max.dim", "min.dim", "any.dim", "all.dim"}) {
    table[std::string("aten::") + name] = reduction(1, 2);
  }
  table["aten::any"] = find_any;
  table["aten::all"] = find_any;
  table["aten::var.correction"] = reduction(1, 3);
  table["aten::std.correction"] = reduction(1, 3);
  table["aten::norm.ScalarOpt_dim"] = reduction(2, 3);
  table["aten::linalg_vector_norm"] = reduction(2, 3);
}

}  // namespace ds::parallel
