#include "loops/renormed_tables.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/record_function.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_set>

#include "core/check.h"
#include "core/op_interceptor.h"
#include "core/text.h"

namespace ds::loops {
namespace {

template <class Layer>
std::optional<RenormedTable> table_of(const torch::nn::Module& module) {
  const auto* const layer = module.as<Layer>();
  if (layer == nullptr || !layer->options.max_norm()) return std::nullopt;
  // torch::nn::functional::embedding() rounds both to float, too.
  return RenormedTable{.name = {},
                       .weight = layer->weight,
                       .max_norm = static_cast<float>(*layer->options.max_norm()),
                       .norm_type = static_cast<float>(layer->options.norm_type())};
}

at::Tensor norms_of_rows(const at::Tensor& rows, double norm_type) {
  return at::linalg_vector_norm(rows, norm_type, at::IntArrayRef{1}, /*keepdim=*/false, at::kDouble);
}

}  // namespace

std::vector<RenormedTable> renormed_tables(const torch::nn::Module& module,
                                           const std::vector<zero::Parameter>& trained) {
  std::vector<RenormedTable> tables;
  std::unordered_set<const void*> seen;
  for (const std::shared_ptr<torch::nn::Module>& layer : module.modules()) {
    std::optional<RenormedTable> table = table_of<torch::nn::EmbeddingImpl>(*layer);
    if (!table) table = table_of<torch::nn::EmbeddingBagImpl>(*layer);
    if (!table || !seen.insert(table->weight.unsafeGetTensorImpl()).second) continue;
    const auto found = std::find_if(trained.begin(), trained.end(), [&](const zero::Parameter& parameter) {
      return parameter.tensor.is_same(table->weight);
    });
    if (found == trained.end()) continue;  // frozen, or split over ranks
    table->name = found->name;
    tables.push_back(std::move(*table));
  }
  return tables;
}

std::string text_of(const std::vector<RenormedTable>& tables) {
  std::string text;
  for (const RenormedTable& table : tables) {
    text += cat("max_norm of ", table.name, '\t', table.max_norm, ", norm_type ", table.norm_type, '\n');
  }
  return text;
}

void share_shortened_rows(const RenormedTable& table, comm::Communicator& ranks, bool is_current) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard not_intercepted(/*is_enabled=*/false);
  at::Tensor values = table.weight.detach();
  const at::Tensor own = norms_of_rows(values, table.norm_type);
  const at::Tensor shortest = is_current ? own.clone() : at::full_like(own, std::numeric_limits<double>::infinity());
  ranks.all_reduce(shortest, comm::ReduceOp::kMin, cat("lengths of the rows of ", table.name)).wait();
  if (!is_current) return;
  const at::Tensor longer = own.gt(shortest).nonzero().view({-1});
  if (longer.numel() == 0) return;
  at::embedding_renorm_(values, longer, table.max_norm, table.norm_type);
  const double rounding = values.element_size() == 2 ? 1e-2 : 1e-5;
  const at::Tensor now = norms_of_rows(values.index_select(0, longer), table.norm_type);
  require(at::allclose(now, shortest.index_select(0, longer), rounding), "parameter ", table.name,
          " of an embedding with max_norm: expected the same rows on all ranks, but for those that forward() has ",
          "shortened since the last backward(), found others. Run no forward() between backward() and the optimizer's ",
          "step, and change the table on every rank alike");
}

void SharedLookups::before_operator(const at::Tensor& tensor) {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (failure_ || !tensor.is_same(tables_[t].weight)) continue;
    const uint64_t running = OpInterceptor::outermost_operator();
    if (OpInterceptor::operator_name() == "aten::embedding_renorm_") {
      shortened_by_[t] = running;
    } else if (shortened_by_[t] != 0 && shortened_by_[t] != running) {  // else it is a part of what shortens them
      shortened_by_[t] = 0;
      try {
        share_shortened_rows(tables_[t], ranks_);
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
  }
}

void SharedLookups::rethrow() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace ds::loops
