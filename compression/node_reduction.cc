#include "compression/node_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "compression/bucket_parts.h"
#include "compression/chained_work.h"

namespace ds::compression {

int64_t node_part_numel(int64_t numel, int ranks_of_node) { return (numel + ranks_of_node - 1) / ranks_of_node; }

NodeReduction::NodeReduction(NodeGroups groups, std::unique_ptr<comm::BucketReduction> across)
    : groups_(std::move(groups)), across_(std::move(across)) {}

comm::Work NodeReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                                std::string label) {
  const at::NoGradGuard no_grad;
  require_reduction("reduction by nodes", label, output, gradient, op, groups_.inside.size() * groups_.nodes);
  return output.is_same(gradient) ? all_reduce(bucket, gradient, op, label)
                                  : reduce_scatter(bucket, output, gradient, op, label);
}

comm::Work NodeReduction::all_reduce(size_t bucket, const at::Tensor& gradient, comm::ReduceOp op,
                                     const std::string& label) {
  const int places = groups_.inside.size();
  const int64_t length = node_part_numel(gradient.numel(), places);
  at::Tensor whole = gradient;
  if (length * places != gradient.numel()) {
    whole = at::zeros({length * places}, gradient.options());
    whole.narrow(0, 0, gradient.numel()).copy_(gradient);
  }
  const at::Tensor own = whole.narrow(0, groups_.inside.rank() * length, length);
  return chained(groups_.inside.first->reduce_scatter(own, whole, op, label),
                 {[=, this] { return across_->start(bucket, own, own, op, label); },
                  [=, this] { return groups_.inside.second->all_gather(whole, own, label); },
                  [=]() -> comm::Work {
                    if (!whole.is_same(gradient)) gradient.copy_(whole.narrow(0, 0, gradient.numel()));
                    return {};
                  }});
}

comm::Work NodeReduction::reduce_scatter(size_t bucket, const at::Tensor& output, const at::Tensor& gradient,
                                         comm::ReduceOp op, const std::string& label) {
  // Parts are numbered [node][place]; a place takes those of its place in all nodes.
  const at::Tensor by_place =
      gradient.view({groups_.nodes, groups_.inside.size(), output.numel()}).transpose(0, 1).contiguous().view(-1);
  const int64_t length = groups_.nodes * output.numel();
  const at::Tensor own = by_place.narrow(0, groups_.inside.rank() * length, length);
  return chained(groups_.inside.first->reduce_scatter(own, by_place, op, label),
                 {[=, this] { return across_->start(bucket, output, own, op, label); },
                  [by_place]() -> comm::Work { return {}; }});
}

NodeOwnerReduction::NodeOwnerReduction(NodeGroups groups, std::unique_ptr<comm::BucketReduction> across)
    : groups_(std::move(groups)), across_(std::move(across)) {}

comm::Work NodeOwnerReduction::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient,
                                     comm::ReduceOp op, std::string label) {
  const at::NoGradGuard no_grad;
  const int places = groups_.inside.size();
  require_reduction("reduction by owners in nodes", label, output, gradient, op, places * groups_.nodes);
  const int owner = owner_of_bucket(bucket, places);
  const bool own = groups_.inside.rank() == owner;
  comm::Work first = groups_.inside.first->reduce(gradient, owner, op, label);
  const auto between = [=, this] { return own ? across_->start(bucket, gradient, gradient, op, label) : comm::Work(); };
  if (output.is_same(gradient)) {
    return chained(std::move(first),
                   {between, [=, this] { return groups_.inside.second->broadcast(gradient, owner, label); },
                    [gradient]() -> comm::Work { return {}; }});
  }
  const at::Tensor received = at::empty_like(output);
  const int64_t of_node = places * output.numel();
  const at::Tensor parts = own ? gradient.narrow(0, groups_.node * of_node, of_node) : at::Tensor();
  return chained(std::move(first),
                 {between, [=, this] { return groups_.inside.second->scatter(received, parts, owner, label); },
                  [=]() -> comm::Work {
                    output.copy_(received);
                    return {};
                  }});
}

}  // namespace ds::compression
