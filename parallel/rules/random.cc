#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "parallel/axis/conversions.h"
#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

// dropout(input, p, train). Every rank draws the mask of the whole from its default generator and takes its part: the
// generators of the ranks, seeded alike, stay alike, and the numbers are those of one process.
Outcome dropout(Call& call) {
  const Operand x = call.operand(0);
  const double p = call.argument(1).toDouble();
  const bool drops = call.argument(2).toBool() && p > 0;
  if (!drops) return call.finish(call.split(x.tensor.alias(), *x.cut, x.sizes));
  if (p >= 1 || elements_of(x.sizes) == 0) return Outcome::kNone;
  const at::Tensor mask = at::empty(x.sizes, x.tensor.options()).bernoulli_(1 - p).div_(1 - p);
  return call.finish_split(x.tensor * slice_of(mask, {.axis = call.axis(), .cut = x.cut}), *x.cut, x.sizes);
}

}  // namespace

void add_random_rules(RuleTable& table) { table["aten::dropout"] = dropout; }

}  // namespace ds::parallel
