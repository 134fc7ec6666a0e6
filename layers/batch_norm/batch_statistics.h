// The arithmetic of batch normalization over ranks: statistics of parts of a batch, joined by their counts.
//
// The formulas are those of torch's SyncBatchNorm; parts are joined as in Chan, Golub and LeVeque, "Updating formulae
// and a pairwise algorithm for computing sample variances" (1979). No graph is built and nothing is sent here. C:
// channels, dimension 1 of an input of [N, C, ...]. What is sent is float64; statistics are float32 for inputs of 16
// bits and of the input's dtype else.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::norm {

// float64 [2 C + 1]: mean and biased variance of each channel, and the number of elements of one. Of no elements:
// zeros.
at::Tensor local_statistics(const at::Tensor& input);

// The statistics of the joined batch.
struct BatchStatistics {
  at::Tensor mean;        // [C]
  at::Tensor variance;    // [C], biased
  at::Tensor inverse;     // [C], 1 / sqrt(variance + eps)
  at::Tensor unbiased;    // float64 [C], variance by count - 1
  at::Tensor exact_mean;  // float64 [C]
  at::Tensor count;       // float64 [1]
};
// `parts`: float64 [ranks, 2 C + 1], what local_statistics() gave on each.
BatchStatistics join_statistics(const at::Tensor& parts, const at::Tensor& input, double eps);

// running = (1 - momentum) * running + momentum * value, in place. value: float64 [C].
void update_running(const at::Tensor& running, const at::Tensor& value, double momentum);

// (input - mean) * inverse * weight + bias, of the input's dtype. weight and bias may be undefined.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const BatchStatistics& statistics, double eps);

// float64 [2 C]: sums of gradient * (input - mean) * inverse, and of gradient, over this rank's part.
at::Tensor local_gradient_sums(const at::Tensor& gradient, const at::Tensor& input, const BatchStatistics& statistics,
                               double eps);

// The input's gradient. `sums`: those of local_gradient_sums(), added up over the ranks.
at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                          const BatchStatistics& statistics, const at::Tensor& sums);

}  // namespace ds::norm
