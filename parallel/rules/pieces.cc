#include <ATen/ops/cat.h>
#include <ATen/ops/unsqueeze.h>

#include <algorithm>
#include <utility>

#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

// Elements [begin, begin + length) along `dim`; undefined where a rank does not have just that.
at::Tensor piece(const Call& call, const Operand& x, int64_t dim, DimRange range) {
  Sizes sizes = x.sizes;
  sizes[dim] = range.length;
  if (dim != x.cut->dim) return call.split(x.tensor.narrow(dim, range.begin, range.length), *x.cut, sizes);
  if (range.begin == 0 && range.length == x.sizes[dim]) return call.split(x.tensor.alias(), *x.cut, sizes);
  const auto taken = narrowed(*x.cut, x.sizes[dim], range, call.axis()->rank(), call.axis()->size());
  if (!taken) return {};
  return call.split(x.tensor.narrow(dim, taken->part.begin, taken->part.length), taken->cut, sizes);
}

Outcome finish_piece(Call& call, const Operand& x, int64_t dim, DimRange range) {
  if (range.begin < 0 || range.length < 0 || range.begin + range.length > x.sizes[dim]) return Outcome::kJoin;
  const at::Tensor result = piece(call, x, dim, range);
  return result.defined() ? call.finish(result) : Outcome::kJoin;
}

Outcome finish_pieces(Call& call, const Operand& x, int64_t dim, const std::vector<int64_t>& lengths) {
  c10::List<at::Tensor> results;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    if (length < 0 || begin + length > x.sizes[dim]) return Outcome::kJoin;
    const at::Tensor result = piece(call, x, dim, {.begin = begin, .length = length});
    if (!result.defined()) return Outcome::kJoin;
    results.push_back(result);
    begin += length;
  }
  return begin == x.sizes[dim] ? call.finish(results) : Outcome::kJoin;
}

// The dimension in argument i; -1: there is none such.
int64_t dim_at(const Call& call, size_t i, const Operand& x) {
  const int64_t dim = wrapped_dim(call.argument(i).toInt(), x.dim());
  return dim >= 0 && dim < x.dim() ? dim : -1;
}

std::vector<int64_t> equal_lengths(int64_t extent, int64_t length) {
  std::vector<int64_t> result;
  for (int64_t begin = 0; begin < extent; begin += length) result.push_back(std::min(length, extent - begin));
  return result;
}

// split.Tensor(self, size, dim)
Outcome split_equally(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 2, x);
  const int64_t length = call.argument(1).toInt();
  if (dim < 0 || length <= 0 || x.sizes[dim] == 0) return Outcome::kJoin;
  return finish_pieces(call, x, dim, equal_lengths(x.sizes[dim], length));
}

Outcome chunk(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 2, x);
  const int64_t count = call.argument(1).toInt();
  if (dim < 0 || count <= 0 || x.sizes[dim] == 0) return Outcome::kJoin;
  return finish_pieces(call, x, dim, equal_lengths(x.sizes[dim], (x.sizes[dim] + count - 1) / count));
}

Outcome split_with_sizes(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 2, x);
  return dim < 0 ? Outcome::kJoin : finish_pieces(call, x, dim, call.argument(1).toIntVector());
}

Outcome unbind(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 1, x);
  if (dim < 0 || dim == x.cut->dim) return Outcome::kJoin;
  Sizes sizes = x.sizes;
  sizes.erase(sizes.begin() + dim);
  const Cut cut = along(*x.cut, x.cut->dim - (x.cut->dim > dim ? 1 : 0));
  c10::List<at::Tensor> results;
  for (const at::Tensor& part : x.tensor.unbind(dim)) results.push_back(call.split(part, cut, sizes));
  return call.finish(results);
}

Outcome narrow(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 1, x);
  if (dim < 0 || !call.argument(2).isInt()) return Outcome::kJoin;
  const int64_t begin = wrapped_dim(call.argument(2).toInt(), x.sizes[dim]);
  return finish_piece(call, x, dim, {.begin = begin, .length = call.argument(3).toInt()});
}

Outcome slice(Call& call) {
  const Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 1, x);
  if (dim < 0 || call.argument(4).toInt() != 1) return Outcome::kJoin;
  const int64_t extent = x.sizes[dim];
  const auto bound = [&](size_t i, int64_t otherwise) {
    return call.argument(i).isNone() ? otherwise : wrapped_dim(call.argument(i).toInt(), extent);
  };
  const int64_t begin = std::clamp<int64_t>(bound(2, 0), 0, extent);
  const int64_t end = std::clamp<int64_t>(bound(3, extent), begin, extent);
  return finish_piece(call, x, dim, {.begin = begin, .length = end - begin});
}

Outcome select(Call& call) {
  Operand x = call.operand(0);
  const int64_t dim = dim_at(call, 1, x);
  if (dim < 0 || dim == x.cut->dim || !call.argument(2).isInt()) return Outcome::kJoin;
  x.sizes.erase(x.sizes.begin() + dim);
  const Cut cut = along(*x.cut, x.cut->dim - (x.cut->dim > dim ? 1 : 0));
  return call.finish_split(x.tensor.select(dim, call.argument(2).toInt()), cut, x.sizes);
}

// Along the cut blocks follow blocks; along another dimension all are cut alike, whole ones too.
Outcome cat(Call& call) {
  const std::vector<Operand> operands = call.operands(0);
  const auto lead = std::find_if(operands.begin(), operands.end(), [](const Operand& x) { return x.is_split(); });
  const int64_t dims = lead->dim();
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), dims);
  if (dim < 0 || dim >= dims) return Outcome::kJoin;
  Cut cut = *lead->cut;
  if (dim == cut.dim) cut = {.dim = dim, .blocks = {}, .grain = cut.grain, .order = cut.order};
  Sizes sizes = lead->sizes;
  sizes[dim] = 0;
  for (const Operand& x : operands) {
    if (x.dim() != dims || elements_of(x.sizes) == 0) return Outcome::kJoin;
    sizes[dim] += x.sizes[dim];
    if (dim != cut.dim) {
      if (x.sizes[cut.dim] != sizes[cut.dim]) return Outcome::kJoin;
      continue;
    }
    if (!x.is_split() || x.cut->dim != dim || x.cut->grain != cut.grain || x.cut->order != cut.order) {
      return Outcome::kJoin;
    }
    const std::vector<int64_t> blocks = blocks_of(*x.cut, x.sizes[dim]);
    for (int64_t i = 0; i < x.cut->repeats; ++i) cut.blocks.insert(cut.blocks.end(), blocks.begin(), blocks.end());
  }
  std::vector<at::Tensor> parts;
  for (const Operand& x : operands) parts.push_back(dim == cut.dim ? x.tensor : part_as(x, cut, call.axis()));
  return call.finish_split(at::cat(parts, dim), cut, sizes);
}

Outcome stack(Call& call) {
  std::vector<at::Tensor> tensors = call.argument(0).toTensorVector();
  const int64_t dims = tensors[0].dim() + 1;
  const int64_t dim = wrapped_dim(call.argument(1).toInt(), dims);
  if (dim < 0 || dim >= dims) return Outcome::kJoin;
  for (at::Tensor& tensor : tensors) {
    if (tensor.sizes() != call.argument(0).toTensorList().get(0).sizes()) return Outcome::kJoin;
    tensor = at::unsqueeze(tensor, dim);
  }
  return call.finish(at::cat(tensors, dim));
}

}  // namespace

void add_piece_rules(RuleTable& table) {
  table["aten::split.Tensor"] = split_equally;
  table["aten::chunk"] = chunk;
  table["aten::split_with_sizes"] = split_with_sizes;
  table["aten::unbind.int"] = unbind;
  table["aten::narrow"] = narrow;
  table["aten::slice.Tensor"] = slice;
  table["aten::select.int"] = select;
  table["aten::cat"] = cat;
  table["aten::concat"] = cat;
  table["aten::stack"] = stack;
}

}  // namespace ds::parallel
