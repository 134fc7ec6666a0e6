#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/torch_version/node.h"
#include "parallel/axis/conversions.h"
#include "parallel/axis/overlap.h"
#include "parallel/rules/dtypes.h"
#include "parallel/rules/rules.h"

namespace ds::parallel {
namespace {

// The product's factors: x [..., k], converted (axis/overlap.h), and weights [n, k]; bias [n] or undefined.
struct LayerFactors {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
};

namespace autograd = torch::autograd;

// The tensor as a matrix, even where this rank has no column.
at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t rows = c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
  return tensor.reshape({rows, tensor.size(-1)});
}

// Computes the gradient of the input, and passes the output's on to LayerWeightBackward.
class LayerInputBackward : public autograd::Node {
 public:
  explicit LayerInputBackward(const LayerFactors& factors)
      : weight_(factors.weight, /*is_output=*/false), sizes_(factors.x.sizes().vec()) {}
  std::string name() const override { return "SplitLayerInput"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor(), at::Tensor()};
    at::Tensor of_input;
    if (task_should_compute_output(0)) of_input = at::mm(as_rows(gradient), weight_.unpack()).view(sizes_);
    return {of_input, gradient};
  }
  void release_variables() override { weight_.reset_data(); }

 private:
  autograd::SavedVariable weight_;
  std::vector<int64_t> sizes_;
};

class LayerWeightBackward : public autograd::Node {
 public:
  LayerWeightBackward(uint64_t number, const LayerFactors& factors)
      : autograd::Node(number), input_(factors.x, /*is_output=*/false) {}
  std::string name() const override { return "SplitLayerWeight"; }
  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    autograd::variable_list result(num_outputs());
    if (!gradients[0].defined()) return result;
    const at::Tensor rows = as_rows(gradients[0]);
    if (task_should_compute_output(0)) result[0] = at::mm(rows.t(), as_rows(input_.unpack()));
    if (num_outputs() > 1 && task_should_compute_output(1)) result[1] = rows.sum(0);
    return result;
  }
  void release_variables() override { input_.reset_data(); }

 private:
  autograd::SavedVariable input_;
};

// Whether gradients can be overlapped: the input's is summed over the ranks so, and the weight has one.
bool can_overlap(const LayerFactors& factors) {
  // Under autocast the product has another dtype than its factors.
  return at::GradMode::is_enabled() && factors.weight.requires_grad() && !factors.weight.is_complex() &&
         !factors.x.is_complex() && !under_autocast(factors.x) && number_beside(factors.x).has_value();
}

// Gives `product`, the values of x weight^T + bias without a history, one whose weight's gradient is computed beside
// the sum of the input's gradient over the ranks (Megatron-LM's asynchronous tensor-parallel all-reduce; DeepSpeed's
// tp_overlap_comm). The gradients have the bits of at::linear's.
at::Tensor with_overlapped_gradients(const at::Tensor& product, const LayerFactors& factors) {
  const auto of_weight = make_node<LayerWeightBackward>(*number_beside(factors.x), factors);
  autograd::edge_list edges = {autograd::impl::gradient_edge(factors.weight)};
  if (factors.bias.defined()) {
    edges.push_back(factors.bias.requires_grad() ? autograd::impl::gradient_edge(factors.bias) : autograd::Edge());
  }
  of_weight->set_next_edges(std::move(edges));
  of_weight->add_input_metadata(product);
  const auto of_input = make_node<LayerInputBackward>(factors);
  of_input->set_next_edges({autograd::impl::gradient_edge(factors.x), autograd::Edge(of_weight, 0)});
  at::Tensor result = product;
  autograd::set_history(result, of_input);
  return result;
}

// Dimensions of a product by letters, as einsum has them: what both factors have and the result has not is summed over.
using Letters = c10::SmallVector<int, 6>;
constexpr int kSummed = 100;   // k of [m, k] x [k, n]
constexpr int kColumns = 101;  // n

struct Factor {
  size_t argument;
  Operand operand;
  Letters letters;

  // -1: it has no such dimension.
  int64_t dim_of(int letter) const {
    const auto found = std::find(letters.begin(), letters.end(), letter);
    return found == letters.end() ? -1 : found - letters.begin();
  }
  int cut_letter() const { return operand.is_split() ? letters[operand.cut->dim] : -1; }
  int64_t extent(int letter) const { return operand.sizes[dim_of(letter)]; }
};

// Which dimension of a product is cut, and how.
struct ProductCut {
  int letter;
  Cut cut;
};

// Weights stay where they are: with two split factors the second one decides.
ProductCut choose_cut(const Factor& x, const Factor& w) {
  const Factor& lead = w.operand.is_split() ? w : x;
  return {.letter = lead.cut_letter(), .cut = *lead.operand.cut};
}

at::Tensor factor_part(const Call& call, const Factor& factor, const ProductCut& chosen, bool shared) {
  const int64_t dim = factor.dim_of(chosen.letter);
  if (dim >= 0) return part_as(factor.operand, along(chosen.cut, dim), call.axis());
  return shared ? shared_for_parts(call.given(factor.argument), call.axis()) : for_parts(factor.operand, call.axis());
}

struct Product {
  Factor x;
  Factor w;
  Letters of_result;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias)> multiply;
  Operand bias;          // along the result's last dimension, the columns; undefined: none
  bool of_layer = true;  // with a matrix of weights
};

// x w + bias, of which the weights are [n, k] or its transpose.
at::Tensor part_of_columns(const Product& product, const LayerFactors& factors) {
  const auto& [x, w, bias] = factors;
  const auto multiplied = [&] { return product.multiply(x, w, bias); };
  if (!product.of_layer) return multiplied();
  LayerFactors as_linear = factors;
  if (product.w.letters[0] != kColumns) as_linear.weight = w.t();
  if (!can_overlap(as_linear)) return multiplied();
  at::Tensor values;
  {
    const at::NoGradGuard no_grad;
    values = multiplied();
  }
  return with_overlapped_gradients(values, as_linear);
}

Outcome compute_product(Call& call, const Product& product) {
  const auto& [x, w, of_result, multiply, bias, of_layer] = product;
  ProductCut chosen{.letter = kColumns, .cut = {}};
  if (x.operand.is_split() || w.operand.is_split()) {
    chosen = choose_cut(x, w);
  } else {
    chosen.cut = *bias.cut;
  }
  Sizes sizes;
  for (const int letter : of_result) sizes.push_back(x.dim_of(letter) >= 0 ? x.extent(letter) : w.extent(letter));
  const at::Tensor x_part = factor_part(call, x, chosen, true);
  const at::Tensor w_part = factor_part(call, w, chosen, false);
  const bool joins = joins_output(call.given(w.argument));
  const std::optional<Cut> sequence = of_layer && !joins ? sequence_cut(sizes, *call.axis()) : std::nullopt;
  if (chosen.letter == kSummed && sequence) {
    at::Tensor part = summed_to_part(multiply(x_part, w_part, {}), {.axis = call.axis(), .cut = sequence});
    if (bias.defined()) part = part + for_parts(bias, call.axis()).to(part.scalar_type());
    return call.finish_split(part, *sequence, sizes);
  }
  if (chosen.letter == kSummed) {
    at::Tensor sum = summed(multiply(x_part, w_part, {}), call.axis());
    if (bias.defined()) sum = sum + as_plain(bias, call.axis()).to(sum.scalar_type());
    return call.finish(sum);
  }
  at::Tensor bias_part;
  if (bias.defined()) {
    bias_part =
        chosen.letter == kColumns ? part_as(bias, along(chosen.cut, 0), call.axis()) : for_parts(bias, call.axis());
  }
  const auto place = std::find(of_result.begin(), of_result.end(), chosen.letter) - of_result.begin();
  const at::Tensor part = part_of_columns(product, {.x = x_part, .weight = w_part, .bias = bias_part});
  if (joins) return call.finish_joined(part, along(chosen.cut, place), sizes);
  return call.finish_split(part, along(chosen.cut, place), sizes);
}

// Rows of x, then `last`.
Letters row_letters(int64_t dims, int last) {
  Letters result;
  for (int64_t i = 0; i + 1 < dims; ++i) result.push_back(static_cast<int>(i));
  result.push_back(last);
  return result;
}

bool has_elements(const Operand& x) { return elements_of(x.sizes) > 0; }

Outcome linear(Call& call) {
  Product product{.x = {.argument = 0, .operand = call.operand(0), .letters = {}},
                  .w = {.argument = 1, .operand = call.operand(1), .letters = {kColumns, kSummed}},
                  .of_result = {},
                  .multiply = [](const auto& x, const auto& w, const auto& b) { return at::linear(x, w, b); },
                  .bias = call.operand(2)};
  const int64_t dims = product.x.operand.dim();
  const bool fits =
      dims >= 1 && product.w.operand.dim() == 2 && has_elements(product.x.operand) &&
      product.x.operand.sizes.back() == product.w.operand.sizes[1] &&
      (!product.bias.defined() || (product.bias.dim() == 1 && product.bias.sizes[0] == product.w.operand.sizes[0]));
  if (!fits) return Outcome::kJoin;
  product.x.letters = row_letters(dims, kSummed);
  product.of_result = row_letters(dims, kColumns);
  return compute_product(call, product);
}

// x [.., k] times w [k, n] in arguments `first` and the next one.
Outcome multiply_matrix(Call& call, size_t first, const Operand& bias) {
  Product product{.x = {.argument = first, .operand = call.operand(first), .letters = {}},
                  .w = {.argument = first + 1, .operand = call.operand(first + 1), .letters = {kSummed, kColumns}},
                  .of_result = {},
                  .multiply = [](const auto& x, const auto& w,
                                 const auto& b) { return b.defined() ? at::addmm(b, x, w) : at::matmul(x, w); },
                  .bias = bias};
  const int64_t dims = product.x.operand.dim();
  if (!has_elements(product.x.operand) || product.x.operand.sizes.back() != product.w.operand.sizes[0]) {
    return Outcome::kJoin;
  }
  product.x.letters = row_letters(dims, kSummed);
  product.of_result = row_letters(dims, kColumns);
  return compute_product(call, product);
}

// Two tensors of as many dimensions and the same batches.
Outcome multiply_batches(Call& call) {
  Product product{.x = {.argument = 0, .operand = call.operand(0), .letters = {}},
                  .w = {.argument = 1, .operand = call.operand(1), .letters = {}},
                  .of_result = {},
                  .multiply = [](const auto& x, const auto& w, const auto& /*bias*/) { return at::matmul(x, w); },
                  .bias = {},
                  .of_layer = false};
  const Operand& x = product.x.operand;
  const Operand& w = product.w.operand;
  const int64_t dims = x.dim();
  if (!has_elements(x) || w.dim() != dims || x.sizes[dims - 1] != w.sizes[dims - 2]) return Outcome::kNone;
  if (!std::equal(x.sizes.begin(), x.sizes.end() - 2, w.sizes.begin())) return Outcome::kNone;
  product.x.letters = row_letters(dims, kSummed);
  product.w.letters = row_letters(dims, kColumns);
  product.w.letters[dims - 2] = kSummed;
  product.of_result = row_letters(dims, kColumns);
  return compute_product(call, product);
}

Outcome matmul(Call& call) {
  const int64_t dims = call.given(0).dim();
  const int64_t w_dims = call.given(1).dim();
  if (dims >= 2 && w_dims == 2) return multiply_matrix(call, 0, {});
  return dims >= 3 ? multiply_batches(call) : Outcome::kNone;
}

Outcome mm(Call& call) {
  if (call.given(0).dim() != 2 || call.given(1).dim() != 2) return Outcome::kJoin;
  return multiply_matrix(call, 0, {});
}

Outcome bmm(Call& call) {
  return call.given(0).dim() == 3 && call.given(1).dim() == 3 ? multiply_batches(call) : Outcome::kJoin;
}

// addmm(bias, x, w, beta, alpha)
Outcome addmm(Call& call) {
  const Operand bias = call.operand(0);
  const bool plain_sum = call.argument(3).toScalar().equal(1) && call.argument(4).toScalar().equal(1);
  if (!plain_sum || bias.dim() != 1 || call.given(1).dim() != 2 || call.given(2).dim() != 2) return Outcome::kJoin;
  if (bias.sizes[0] != call.given(2).size(1)) return Outcome::kJoin;
  return multiply_matrix(call, 1, bias);
}

// baddbmm(added, x, w, beta, alpha)
Outcome baddbmm(Call& call) {
  const c10::Scalar beta = call.argument(3).toScalar();
  const c10::Scalar alpha = call.argument(4).toScalar();
  at::Tensor product = at::bmm(call.given(1), call.given(2));
  if (!alpha.equal(1)) product = product * alpha;
  if (!beta.equal(0)) {
    // The product has the dtype of the result, also under autocast.
    const at::Tensor added = call.given(0).to(product.scalar_type());
    product = product + (beta.equal(1) ? added : added * beta);
  }
  return call.finish(product);
}

}  // namespace

void add_product_rules(RuleTable& table) {
  table["aten::linear"] = linear;
  table["aten::matmul"] = matmul;
  table["aten::mm"] = mm;
  table["aten::bmm"] = bmm;
  table["aten::addmm"] = addmm;
  table["aten::baddbmm"] = baddbmm;
}

}  // namespace ds::parallel
