#include "compression/bucket_parts.h"

#include <algorithm>

#include "comm/collective.h"
#include "core/check.h"
#include "core/tensor_check.h"

namespace ds::compression {

void require_reduction(const char* what, const std::string& label, const at::Tensor& output, const at::Tensor& gradient,
                       comm::ReduceOp op, int ranks) {
  require(op == comm::ReduceOp::kSum || op == comm::ReduceOp::kAvg, what, " (", label, "): expected sum or avg, found ",
          comm::name_of(op));
  require(gradient.defined() && gradient.dim() == 1 && gradient.is_contiguous() &&
              (gradient.scalar_type() == at::kFloat || gradient.scalar_type() == at::kBFloat16 ||
               gradient.scalar_type() == at::kHalf),
          what, " (", label, "): expected a flat, contiguous gradient of float32, bfloat16 or float16, found ",
          describe(gradient));
  require(output.defined() && output.is_contiguous() && output.scalar_type() == gradient.scalar_type() &&
              (output.is_same(gradient) || output.numel() * ranks == gradient.numel()),
          what, " (", label, "): expected the gradient itself as output, or 1 / ", ranks, " of it, found ",
          describe(output), " and ", describe(gradient));
}

comm::Work keep_alone(const at::Tensor& output, const at::Tensor& gradient) {
  if (!output.is_same(gradient)) output.copy_(gradient);
  return {};
}

std::vector<Part> parts_of(int64_t numel, int ranks) {
  const int64_t length = (numel + ranks - 1) / ranks;
  std::vector<Part> parts;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rank * length, numel);
    parts.push_back({begin, std::min(length, numel - begin)});
  }
  return parts;
}

}  // namespace ds::compression
