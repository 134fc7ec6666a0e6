#include "layers/sharded_tables.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/replay/own_results.h"
#include "core/slices/table_rows.h"
#include "core/tensor_check.h"
#include "core/tensor_table.h"
#include "core/torch_version/node.h"
#include "layers/layer_operators.h"

namespace ds::layers {
namespace {

namespace autograd = torch::autograd;

TensorTable<std::weak_ptr<const ReadRows>>& readers_by_weight() {
  static TensorTable<std::weak_ptr<const ReadRows>> table;
  return table;
}

// Makes a sparse gradient of the table from the gradient of the rows that were read.
class ShardedTableBackward : public autograd::Node {
 public:
  // `rows`: the numbers of those that were read. `padding`: a row without a gradient; negative: all have one.
  ShardedTableBackward(at::Tensor rows, std::vector<int64_t> sizes, int64_t padding)
      : rows_(std::move(rows)), sizes_(std::move(sizes)), padding_(padding) {}

  std::string name() const override { return "ShardedTableBackward"; }

  // NOLINTNEXTLINE(cppcoreguidelines-rvalue-reference-param-not-moved): autograd's signature
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    require(!at::GradMode::is_enabled(), "backward with create_graph: expected first derivatives only, found a double ",
            "backward through an embedding whose rows are sharded; set sparse(false) on the layer");
    if (!gradients[0].defined() || !task_should_compute_output(0)) return autograd::variable_list(1);
    TableRows result = {.rows = rows_, .values = gradients[0].narrow(0, 0, rows_.numel())};
    if (padding_ >= 0) {
      const at::Tensor kept = rows_.ne(padding_).nonzero().reshape({-1});
      result = {.rows = rows_.index_select(0, kept), .values = result.values.index_select(0, kept)};
    }
    return {sparse_of(result, sizes_, /*coalesced=*/true)};
  }

 private:
  const at::Tensor rows_;
  const std::vector<int64_t> sizes_;
  const int64_t padding_;
};

// The places of an operator's arguments behind weight and indices, which come first.
struct Arguments {
  size_t padding;
  size_t sparse;
};
constexpr Arguments kEmbedding = {.padding = 2, .sparse = 4};
constexpr Arguments kBag = {.padding = 8, .sparse = 5};

// A small table in the place of the large one.
struct RowsRead {
  at::Tensor numbers;  // of its rows in the large table
  at::Tensor values;   // the rows, and one of zeros where none was read, so that kernels find a table
  at::Tensor indices;  // those of the operator, in the small table
  int64_t padding = -1;
};

RowsRead read_rows(const at::Tensor& weight, const at::Tensor& indices, int64_t padding, const ReadRows& read) {
  const at::NoGradGuard no_grad;
  require(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
          "embedding: expected indices of int64 or int32, found ", describe(indices));
  require(indices.device() == weight.device(), "embedding: expected indices on ", weight.device(), ", found ",
          describe(indices));
  const auto [numbers, inverse, counts] = at::_unique2(indices.to(at::kLong), /*sorted=*/true, /*return_inverse=*/true);
  RowsRead result{.numbers = numbers, .values = read(numbers), .indices = inverse.to(indices.scalar_type())};
  if (!result.values.defined()) return result;
  if (numbers.numel() == 0) result.values = at::zeros({1, weight.size(1)}, weight.options().requires_grad(false));
  if (padding < 0) return result;
  const at::Tensor place = numbers.eq(padding).nonzero();
  if (place.numel() > 0) result.padding = place.item<int64_t>();
  return result;
}

// Stands in front of one operator at one key.
class InFrontOfLookup : public c10::OperatorKernel {
 public:
  // `has_graph`: the key is autograd's.
  InFrontOfLookup(Arguments places, bool has_graph, size_t arguments, c10::SafeKernelFunction behind)
      : places_(places), has_graph_(has_graph), count_(arguments), behind_(std::move(behind)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    c10::IValue* const arguments = stack->data() + (stack->size() - count_);
    const at::Tensor weight = arguments[0].toTensor();
    const std::shared_ptr<const ReadRows> read = readers_by_weight().find(weight).lock();
    if (!read) return behind_.callBoxed(op, keys, stack);
    const int64_t padding = arguments[places_.padding].toInt();
    RowsRead rows = read_rows(weight, arguments[1].toTensor(), padding, *read);
    if (!rows.values.defined()) return behind_.callBoxed(op, keys, stack);
    OwnResults::note();
    if (has_graph_ && autograd::compute_requires_grad(weight)) {
      const NodePointer<> node = make_node<ShardedTableBackward>(rows.numbers, weight.sizes().vec(), padding);
      node->set_next_edges(autograd::collect_next_edges(weight));
      autograd::set_history(rows.values, node);
    }
    arguments[0] = rows.values;
    arguments[1] = rows.indices;
    arguments[places_.padding] = rows.padding;
    arguments[places_.sparse] = false;  // the gradient of few rows
    op.callBoxed(stack);
    if (places_.padding == kBag.padding) name_largest(stack->back(), rows.numbers);
  }

 private:
  // Turns the last result of a bag, the rows of the largest elements, back into those of the large table.
  static void name_largest(c10::IValue& result, const at::Tensor& numbers) {
    const at::Tensor largest = result.toTensor();
    if (largest.dim() != 2 || largest.numel() == 0 || numbers.numel() == 0) return;
    const at::NoGradGuard no_grad;
    const at::Tensor named = numbers.index_select(0, largest.reshape({-1}).clamp_min(0).to(at::kLong));
    result = at::where(largest.lt(0), largest, named.view_as(largest).to(largest.scalar_type()));
  }

  const Arguments places_;
  const bool has_graph_;
  const size_t count_;  // of the operator's arguments
  const c10::SafeKernelFunction behind_;
};

struct LookupPlace {
  c10::DispatchKey key;
  bool has_graph;
};
// Without autograd, as in inference mode, calls come to the second two.
constexpr std::array<LookupPlace, 4> kLookupPlaces = {
    LookupPlace{c10::DispatchKey::AutogradCPU, true}, LookupPlace{c10::DispatchKey::AutogradCUDA, true},
    LookupPlace{c10::DispatchKey::CPU, false}, LookupPlace{c10::DispatchKey::CUDA, false}};

// Idempotent; any thread.
void register_lookups() {
  [[maybe_unused]] static const bool kDone = [] {
    for (const auto& [key, has_graph] : kLookupPlaces) {
      put_in_front_of<InFrontOfLookup>("aten::embedding", "", key, kEmbedding, has_graph);
      put_in_front_of<InFrontOfLookup>("aten::_embedding_bag", "", key, kBag, has_graph);
      put_in_front_of<InFrontOfLookup>("aten::_embedding_bag_forward_only", "", key, kBag, has_graph);
    }
    return true;
  }();
}

}  // namespace

void read_by_rows(const at::Tensor& weight, const std::shared_ptr<const ReadRows>& rows) {
  register_lookups();
  readers_by_weight().drop([](const auto& reader) { return reader.expired(); });
  readers_by_weight().set(weight, rows);
}

}  // namespace ds::layers
