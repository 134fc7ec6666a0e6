#include "core/parity/parity_bounds.h"

#include <algorithm>
#include <cmath>

#include "core/parity/run_differences.h"
#include "core/text.h"

namespace ds {
namespace {

// Without a second run the bounds of a step are so many times those of the step before, up to kMostGradient.
constexpr double kGrowth = 4;
constexpr double kMostGradient = 0.1;
// One rank differs from the layout by more than the order of its samples: by that of ranks and of reductions, by parts
// of a matrix that a tensor axis adds up.
constexpr double kTimes = 8;
// However the second run looks: a tenth of the dtype's bounds is rounding, and beyond kMost nothing is told any more.
constexpr double kLeast = 0.1;
constexpr ParityBounds kMost = {.loss = 0.05, .norm = 0.2, .gradient = 0.2, .update = 1};

template <class Use>
ParityBounds combined(const ParityBounds& a, const ParityBounds& b, const Use& use) {
  return {.loss = use(a.loss, b.loss),
          .norm = use(a.norm, b.norm),
          .gradient = use(a.gradient, b.gradient),
          .update = use(a.update, b.update)};
}

ParityBounds times(const ParityBounds& bounds, double by) {
  return combined(bounds, bounds, [by](double a, double) { return a * by; });
}

ParityBounds largest(const ParityBounds& a, const ParityBounds& b) {
  return combined(a, b, [](double x, double y) { return std::max(x, y); });
}

ParityBounds grown(const ParityBounds& first, size_t step) {
  const double by = std::pow(kGrowth, static_cast<double>(step - 1));
  return combined(first, first, [by](double a, double) { return std::min(a * by, std::max(a, kMostGradient)); });
}

double largest_of(const std::vector<ParameterDifference>& differences) {
  double result = 0;
  for (const ParameterDifference& one : differences) {
    if (!one.is_small) result = std::isnan(one.relative) ? one.relative : std::max(result, one.relative);
  }
  return result;
}

ParityBounds distance(const RecordedRun& run, const RecordedRun& other, size_t step) {
  const RecordedStep& a = run.steps[step - 1];
  const RecordedStep& b = other.steps[step - 1];
  const std::vector<ParameterDifference> gradients = gradient_differences(run, other, step);
  return {.loss = relative_difference(mean_loss(a), mean_loss(b)),
          .norm = a.norm && b.norm ? relative_difference(*a.norm, *b.norm) : 0,
          .gradient = largest_of(gradients),
          .update = largest_of(update_differences(run, other, step, gradients))};
}

// What the second run measures, or why it does not.
struct Measured {
  std::vector<ParityBounds> steps;
  std::string why_not;
};

Measured measure(const RecordedRun& run, const RecordedRun& other, const ParityBounds& of_dtype) {
  Measured measured;
  ParityBounds sofar;
  for (size_t step = 1; step <= std::min(run.steps.size(), other.steps.size()); ++step) {
    sofar = largest(sofar, distance(run, other, step));
    measured.steps.push_back(sofar);
  }
  const ParityBounds first = measured.steps.front();
  const bool is_right = first.loss <= of_dtype.loss && first.gradient <= of_dtype.gradient;
  if (!is_right) {
    measured.why_not =
        cat("in another order the layout itself trains something else (the loss of step 1 differs by ", first.loss,
            ", a gradient by ", first.gradient, "), so that what the program reads or draws depends on the order");
  } else if (sofar.loss == 0 && sofar.gradient == 0) {
    measured.why_not =
        "a second run is the same to the bit, for the engine had no batches to give in another order (its loader's, "
        "those of train_batch(), random numbers), or no more than two of them are added up";
  }
  return measured;
}

}  // namespace

ParityBounds bounds_of(const std::string& dtype) {
  if (dtype == "bf16") return {.loss = 0.02, .norm = 0.05, .gradient = 0.1, .update = 0.5};
  if (dtype == "fp16") return {.loss = 0.005, .norm = 0.02, .gradient = 0.05, .update = 0.3};
  return {.loss = 1e-4, .norm = 1e-3, .gradient = 2e-3, .update = 0.05};
}

ChosenBounds choose_bounds(const RecordedRun& run, const RecordedRun& reference, const RecordedRun* other_order,
                           const std::string& why_none) {
  const std::string& dtype = run.layout.dtype;
  const std::string& other_dtype = reference.layout.dtype;
  const ParityBounds of_dtype = largest(bounds_of(dtype), bounds_of(other_dtype));
  const size_t steps = std::min(run.steps.size(), reference.steps.size());
  Measured measured;
  measured.why_not = why_none;
  if (other_order != nullptr && dtype != other_dtype) {
    measured.why_not = cat("the runs compute in ", dtype, " and ", other_dtype);
  } else if (other_order != nullptr) {
    measured = measure(run, *other_order, of_dtype);
  }
  ChosenBounds chosen;
  if (!measured.why_not.empty()) {
    for (size_t step = 1; step <= steps; ++step) chosen.steps.push_back(grown(of_dtype, step));
    chosen.source = cat("a constant of ", dtype == other_dtype ? dtype : "the coarser of both", ": ", measured.why_not);
    return chosen;
  }
  const ParityBounds least = times(of_dtype, kLeast);
  for (size_t step = 1; step <= steps; ++step) {
    const ParityBounds& noise = measured.steps[std::min(step, measured.steps.size()) - 1];
    const ParityBounds wanted = largest(least, times(noise, kTimes));
    chosen.steps.push_back(combined(wanted, kMost, [](double a, double most) { return std::min(a, most); }));
  }
  chosen.source = "from a second run of the layout with its batches in another order";
  return chosen;
}

}  // namespace ds
