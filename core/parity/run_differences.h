// How far two recorded runs are from one another, step by step: numbers, without a judgement. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/parity/recorded_run.h"

namespace ds {

// Sums over the elements of two tensors.
struct PairSums {
  double both = 0;        // found * expected
  double found = 0;       // found^2
  double expected = 0;    // expected^2
  double difference = 0;  // (found - expected)^2; infinite for a tensor that is missing or has another size

  void add(double a, double b) {
    both += a * b;
    found += a * a;
    expected += b * b;
    difference += (a - b) * (a - b);
  }
  double ratio() const { return expected > 0 ? both / expected : 0; }
  // What is left of `found`, relative to its norm, when its part in the direction of the other is taken away: 0 for a
  // multiple of it, 1 where nothing was expected.
  double rest() const;
};

// How far one parameter is from that of the other run.
struct ParameterDifference {
  std::string name;
  PairSums sums;
  double relative = 0;    // of the L2 norm
  bool is_small = false;  // of gradients: its norm is rounding beside the norm of the model
};

// The mean loss of a step over all ranks and micro-batches.
double mean_loss(const RecordedStep& step);
std::vector<double> joined(const std::vector<std::vector<double>>& lists);
double mean_of(const std::vector<double>& numbers);
// |a - b| relative to the larger of the two; 0 where neither is finite, infinite where one of them is.
double relative_difference(double a, double b);

// The weights at the start.
std::vector<ParameterDifference> start_differences(const RecordedRun& run, const RecordedRun& reference);
// The gradients of a step, each relative to its own norm, or to a thousandth of its share in the norm of the model
// where that is larger.
std::vector<ParameterDifference> gradient_differences(const RecordedRun& run, const RecordedRun& reference,
                                                      size_t step);
// The changes of the weights in a step, each relative to its own norm, after what float32 rounds off a weight was taken
// away. `gradients`: the differences of the gradients of this step. Left out are parameters whose gradients are small
// there, and those that one run lacks.
std::vector<ParameterDifference> update_differences(const RecordedRun& run, const RecordedRun& reference, size_t step,
                                                    const std::vector<ParameterDifference>& gradients);

}  // namespace ds
