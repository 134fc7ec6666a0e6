#include <ATen/ops/squeeze.h>

#include <algorithm>
#include <utility>

#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

std::vector<int64_t> as_vector(c10::IntArrayRef values) { return values.vec(); }

// `to` without -1; nothing where there is more than one, or no size that fits.
std::optional<std::vector<int64_t>> inferred(std::vector<int64_t> to, int64_t elements) {
  const auto unknown = std::find(to.begin(), to.end(), -1);
  if (unknown == to.end()) return to;
  *unknown = 1;
  const int64_t known = elements_of(to);
  if (known <= 0 || elements % known != 0) return std::nullopt;
  *unknown = elements / known;
  return to;
}

Outcome reshape_to(Call& call, const std::vector<int64_t>& wanted, bool view) {
  const Operand x = call.operand(0);
  const int64_t elements = elements_of(x.sizes);
  const auto to = inferred(wanted, elements);
  if (!x.is_split() || elements == 0 || !to || elements_of(*to) != elements) return Outcome::kJoin;
  const std::optional<Cut> cut = reshaped(*x.cut, as_vector(x.sizes), *to, call.axis()->size());
  if (!cut) return Outcome::kJoin;
  std::vector<int64_t> part = *to;
  part[cut->dim] = part_extent(*cut, part[cut->dim], call.axis()->rank(), call.axis()->size());
  return call.finish_split(view ? x.tensor.view(part) : x.tensor.reshape(part), *cut, *to);
}

Outcome view(Call& call) {
  if (!call.argument(1).isIntList()) return Outcome::kJoin;  // as another dtype
  return reshape_to(call, call.argument(1).toIntVector(), true);
}

Outcome reshape(Call& call) { return reshape_to(call, call.argument(1).toIntVector(), false); }

Outcome flatten(Call& call) {
  const Operand x = call.operand(0);
  if (!call.argument(1).isInt() || !call.argument(2).isInt() || x.dim() == 0) return Outcome::kNone;
  const int64_t begin = wrapped_dim(call.argument(1).toInt(), x.dim());
  const int64_t end = wrapped_dim(call.argument(2).toInt(), x.dim());
  if (begin < 0 || end >= x.dim() || begin > end) return Outcome::kJoin;
  std::vector<int64_t> to(x.sizes.begin(), x.sizes.begin() + begin);
  to.push_back(elements_of(c10::IntArrayRef(x.sizes).slice(begin, end + 1 - begin)));
  to.insert(to.end(), x.sizes.begin() + end + 1, x.sizes.end());
  return reshape_to(call, to, false);
}

Outcome unsqueeze(Call& call) {
  Operand x = call.operand(0);
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), x.dim() + 1);
  if (dim < 0 || dim > x.dim()) return Outcome::kJoin;
  const Cut cut = along(*x.cut, x.cut->dim + (x.cut->dim >= dim ? 1 : 0));
  x.sizes.insert(x.sizes.begin() + dim, 1);
  return call.finish_split(x.tensor.unsqueeze(dim), cut, x.sizes);
}

// squeeze(self), squeeze.dim(self, dim), squeeze.dims(self, dims)
Outcome squeeze(Call& call) {
  const Operand x = call.operand(0);
  std::vector<int64_t> asked;
  if (call.arguments() == 1) {
    for (int64_t dim = 0; dim < x.dim(); ++dim) asked.push_back(dim);
  } else if (call.argument(1).isInt()) {
    asked = {call.argument(1).toInt()};
  } else {
    asked = call.argument(1).toIntVector();
  }
  std::vector<int64_t> dropped;
  for (int64_t& dim : asked) {
    dim = wrapped_dim(dim, x.dim());
    if (dim < 0 || dim >= x.dim()) return Outcome::kJoin;
    if (x.sizes[dim] == 1) dropped.push_back(dim);
  }
  Sizes sizes;
  int64_t moved = 0;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const bool drops = std::find(dropped.begin(), dropped.end(), dim) != dropped.end();
    if (drops && dim == x.cut->dim) return Outcome::kJoin;
    if (drops && dim < x.cut->dim) ++moved;
    if (!drops) sizes.push_back(x.sizes[dim]);
  }
  return call.finish_split(at::squeeze(x.tensor, dropped), along(*x.cut, x.cut->dim - moved), sizes);
}

// transpose.int(self, a, b), t(self)
Outcome transpose(Call& call) {
  Operand x = call.operand(0);
  if (call.arguments() == 3 && !call.argument(1).isInt()) return Outcome::kNone;  // by names
  if (x.dim() == 1) return call.finish_split(x.tensor.alias(), *x.cut, x.sizes);
  const bool named = call.arguments() == 3;
  const int64_t a = named ? wrapped_dim(call.argument(1).toInt(), x.dim()) : 0;
  const int64_t b = named ? wrapped_dim(call.argument(2).toInt(), x.dim()) : 1;
  if (a < 0 || b < 0 || a >= x.dim() || b >= x.dim() || (!named && x.dim() != 2)) return Outcome::kJoin;
  std::swap(x.sizes[a], x.sizes[b]);
  const int64_t dim = x.cut->dim;
  const at::Tensor result = call.split(x.tensor.transpose(a, b),
                                       along(*x.cut, dim == a   ? b
                                                     : dim == b ? a
                                                                : dim),
                                       x.sizes);
  if (joins_output(call.given(0))) mark_joins_output(result);
  return call.finish(result);
}

Outcome permute(Call& call) {
  const Operand x = call.operand(0);
  std::vector<int64_t> order = call.argument(1).toIntVector();
  if (static_cast<int64_t>(order.size()) != x.dim()) return Outcome::kJoin;
  Sizes sizes;
  int64_t dim = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = wrapped_dim(order[i], x.dim());
    if (order[i] < 0 || order[i] >= x.dim()) return Outcome::kJoin;
    sizes.push_back(x.sizes[order[i]]);
    if (order[i] == x.cut->dim) dim = static_cast<int64_t>(i);
  }
  return call.finish_split(x.tensor.permute(order), along(*x.cut, dim), sizes);
}

Outcome expand(Call& call) {
  const Operand x = call.operand(0);
  std::vector<int64_t> to = call.argument(1).toIntVector();
  const int64_t added = static_cast<int64_t>(to.size()) - x.dim();
  if (added < 0) return Outcome::kJoin;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (to[added + dim] == -1) to[added + dim] = x.sizes[dim];
  }
  const Cut cut = along(*x.cut, x.cut->dim + added);
  if (to[cut.dim] != x.sizes[x.cut->dim]) return Outcome::kJoin;
  std::vector<int64_t> part = to;
  part[cut.dim] = x.tensor.size(x.cut->dim);
  return call.finish_split(x.tensor.expand(part), cut, to);
}

// Along the cut the blocks follow one another once more.
Outcome repeat(Call& call) {
  const Operand x = call.operand(0);
  const std::vector<int64_t> times = call.argument(1).toIntVector();
  const int64_t added = static_cast<int64_t>(times.size()) - x.dim();
  if (added < 0 || elements_of(times) <= 0) return Outcome::kJoin;
  Cut cut = along(*x.cut, x.cut->dim + added);
  cut.repeats *= times[cut.dim];
  Sizes sizes(times.begin(), times.end());
  for (int64_t dim = 0; dim < x.dim(); ++dim) sizes[added + dim] *= x.sizes[dim];
  return call.finish_split(x.tensor.repeat(times), cut, sizes);
}

// Shape-preserving, and about the last two dimensions alone.
Outcome triangle(Call& call) {
  const Operand x = call.operand(0);
  if (!x.is_split() || x.cut->dim >= x.dim() - 2) return Outcome::kJoin;
  call.set(0, x.tensor);
  call.run();
  call.result() = call.split(call.result().toTensor(), *x.cut, x.sizes);
  return Outcome::kDone;
}

}  // namespace

void add_shape_rules(RuleTable& table) {
  table["aten::view"] = view;
  table["aten::_reshape_alias"] = view;  // its strides are those of the whole
  table["aten::_unsafe_view"] = reshape;
  table["aten::reshape"] = reshape;
  table["aten::flatten.using_ints"] = flatten;
  table["aten::unsqueeze"] = unsqueeze;
  table["aten::squeeze"] = squeeze;
  table["aten::squeeze.dim"] = squeeze;
  table["aten::squeeze.dims"] = squeeze;
  table["aten::transpose.int"] = transpose;
  table["aten::t"] = transpose;
  table["aten::permute"] = permute;
  table["aten::expand"] = expand;
  table["aten::repeat"] = repeat;
  table["aten::tril"] = triangle;
  table["aten::triu"] = triangle;
}

}  // namespace ds::parallel
