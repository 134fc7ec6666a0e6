#include "compression/dense_first.h"

namespace ds::compression {

comm::Work DenseFirst::start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                             std::string label) {
  if (step_ >= start_step_) return compressed_->start(bucket, output, gradient, op, std::move(label));
  if (output.is_same(gradient)) return group_->all_reduce(gradient, op, std::move(label));
  return group_->reduce_scatter(output, gradient, op, std::move(label));
}

}  // namespace ds::compression
