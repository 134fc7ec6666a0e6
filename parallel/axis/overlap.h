// Conversions whose collective of the backward pass runs beside other work: begun when the gradient is complete, waited
// for by who reads its sum. As used_in_part and joined_for_parts else, bits too.
//
// Autograd runs nodes that are ready in the order of their sequence numbers, the latest first. A conversion is two
// nodes, which begin the collective and wait for it, with a number between them: a node that has this one runs beside
// the collective. What is ready on one rank is so on the others, and collectives keep their order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "core/split/split_tensor.h"

namespace ds::parallel {

// `plain` requires a gradient, and so does `part`.
at::Tensor used_in_part_overlapped(const at::Tensor& plain, const std::shared_ptr<SplitAxis>& axis);
at::Tensor joined_for_parts_overlapped(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes);

// For a tensor that one of these made: the sequence number for what is to run beside its collective.
std::optional<uint64_t> number_beside(const at::Tensor& converted);
// Whether the tensor's history leads to where the gradient of `from` goes, through any conversion.
bool is_converted_from(const at::Tensor& converted, const at::Tensor& from);

}  // namespace ds::parallel
