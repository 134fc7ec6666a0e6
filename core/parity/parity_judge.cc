#include "core/parity/parity_judge.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/parity/parity_names.h"
#include "core/text.h"

namespace ds {
namespace {

// The largest relative distance of a ratio from the number that explains it.
constexpr double kSameRatio = 0.02;
// The largest part of a tensor's norm that may be left when it is explained as a multiple of another.
constexpr double kSameDirection = 0.05;
// A gradient whose norm is a smaller part of the parameter's share in the norm of the model is rounding.
constexpr double kSmallGradient = 1e-3;
// The bounds of a step are so many times those of the step before, up to kMostGradient.
constexpr double kGrowth = 4;
constexpr double kMostGradient = 0.1;
// The relative rounding of a float32 weight that is allowed.
constexpr double kRounding = 4 * 1.2e-7;

std::string three_digits(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::general, 3).ptr;
  return {text.data(), end};
}

// Sums over the elements of two tensors.
struct Sums {
  double both = 0;        // found * expected
  double found = 0;       // found^2
  double expected = 0;    // expected^2
  double difference = 0;  // (found - expected)^2

  void add(double a, double b) {
    both += a * b;
    found += a * a;
    expected += b * b;
    difference += (a - b) * (a - b);
  }
  double ratio() const { return expected > 0 ? both / expected : 0; }
  // Whether one is a multiple of the other.
  bool is_multiple() const {
    if (expected == 0) return false;
    if (found == 0) return true;
    const double rest = found - both * both / expected;
    return rest <= kSameDirection * kSameDirection * found;
  }
};

// A ratio that follows from a layout, and its name: "the data-parallel ranks".
struct Explained {
  double ratio;
  std::string what;
};

std::vector<Explained> known_ratios(const RecordedLayout& layout) {
  const auto d = static_cast<double>(layout.data_ranks);
  const auto a = static_cast<double>(layout.accumulation);
  const auto t = static_cast<double>(layout.tensor_ranks);
  std::vector<Explained> known;
  const auto add = [&](double number, const std::string& of) {
    if (number == 1) return;
    known.push_back({number, of});
    known.push_back({1 / number, cat("1 / ", of)});
    known.push_back({std::sqrt(number), cat("the root of ", of)});
    known.push_back({1 / std::sqrt(number), cat("1 / the root of ", of)});
  };
  add(d, "the data-parallel ranks");
  add(a, "gradient_accumulation_steps");
  add(t, "the ranks of a tensor axis");
  if (d != 2 && a != 2 && t != 2) known.insert(known.end(), {{2, "twice"}, {0.5, "half"}});
  return known;
}

std::string explained(double ratio, const RecordedLayout& layout) {
  std::string text;
  for (const Explained& known : known_ratios(layout)) {
    if (std::abs(ratio - known.ratio) > kSameRatio * known.ratio) continue;
    text += cat(text.empty() ? "" : " or ", known.what);
  }
  return text;
}

std::string ratio_text(double ratio, const RecordedLayout& layout) {
  const std::string known = explained(ratio, layout);
  return cat(three_digits(ratio), " times", known.empty() ? std::string() : cat(" (", known, ")"));
}

bool near(double a, double b, double bound) {
  if (!std::isfinite(a) || !std::isfinite(b)) return std::isfinite(a) == std::isfinite(b);
  return std::abs(a - b) <= bound * std::max({std::abs(a), std::abs(b), 1e-6});
}

bool all_near(const std::vector<double>& a, const std::vector<double>& b, double bound) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [bound](double x, double y) { return near(x, y, bound); });
}

double mean_of(const std::vector<double>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

std::vector<double> joined(const std::vector<std::vector<double>>& lists) {
  std::vector<double> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

double loss_of(const RecordedStep& step) { return step.loss ? *step.loss : mean_of(joined(step.losses)); }

class Judge {
 public:
  Judge(const RecordedRun& run, const RecordedRun& reference)
      : run_(run), reference_(reference), bounds_(bounds_of(run.layout.dtype)) {
    const ParityBounds other = bounds_of(reference.layout.dtype);
    if (other.gradient > bounds_.gradient) bounds_ = other;
  }

  ParityVerdict verdict();

 private:
  double grown(double bound, size_t step) const {
    return std::min(bound * std::pow(kGrowth, static_cast<double>(step - 1)), std::max(bound, kMostGradient));
  }
  // Each of these returns the sentence on what differs, or "".
  std::string start_weights() const;
  std::string loss(size_t step) const;
  std::string gradients(size_t step);
  std::string norm(size_t step) const;
  std::string updates(size_t step) const;
  std::string cause_of_loss(size_t step) const;
  std::string cause_of_gradients(const Sums& sums, size_t differing, size_t all) const;

  const RecordedRun& run_;
  const RecordedRun& reference_;
  ParityBounds bounds_;
  double largest_ = 0;  // relative difference of a gradient
  size_t parameters_ = 0;
  std::vector<std::string> small_;  // parameters whose gradients in the step are rounding
};

// Sums over all elements. The difference from a tensor that is missing or has another size is infinite.
Sums sums_of(const RecordedTensor& found, const RecordedTensor* expected) {
  Sums sums;
  if (expected == nullptr || expected->count != found.count) {
    sums.difference = std::numeric_limits<double>::infinity();
    return sums;
  }
  for (size_t i = 0; i < found.count; ++i) sums.add(found[i], (*expected)[i]);
  return sums;
}

std::string Judge::start_weights() const {
  const RecordedTensors found = run_.tensors(0);
  const RecordedTensors expected = reference_.tensors(0);
  for (const auto& [name, tensor] : found.all()) {
    const Sums sums = sums_of(tensor, expected.find(name));
    if (sums.difference <= bounds_.gradient * bounds_.gradient * std::max(sums.expected, 1e-12)) continue;
    return cat("before the first step: ", name.substr(name.find('/') + 1),
               " begins with other values. Likely: the program draws its start values ",
               "from numbers that differ from process to process (the time, a thread), or loads another file; draw ",
               "them from a fixed seed before initialize()");
  }
  return {};
}

std::string Judge::loss(size_t step) const {
  const double found = loss_of(run_.steps[step - 1]);
  const double expected = loss_of(reference_.steps[step - 1]);
  if (near(found, expected, grown(bounds_.loss, step))) return {};
  return cat("step ", step, ": the loss is ", found, " in place of ", expected, ", ",
             ratio_text(found / expected, run_.layout), ". Likely: ", cause_of_loss(step));
}

std::string Judge::cause_of_loss(size_t step) const {
  const auto& of_ranks = run_.steps[step - 1].losses;
  const std::vector<double> found = joined(of_ranks);
  const std::vector<double> expected = joined(reference_.steps[step - 1].losses);
  const double bound = grown(bounds_.loss, step);
  const bool repeats = of_ranks.size() > 1 && std::all_of(of_ranks.begin(), of_ranks.end(), [&](const auto& one) {
                         return all_near(one, of_ranks.front(), bound);
                       });
  if (repeats) {
    return "all data-parallel ranks got the data of one rank: cut the data by engine->communicator().rank() and "
           "engine->dp_world_size()";
  }
  std::vector<double> a = found;
  std::vector<double> b = expected;
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  if (all_near(a, b, bound)) {
    return "the micro-batches are the same, and the mean over them is not: padding or empty tokens are counted in the "
           "mean, or micro-batches of unlike sizes weigh alike; use backward_mean(sum, count)";
  }
  if (step > 1) {
    return "gradients and weights before it agree, so something else that forward reads has parted: buffers that are "
           "not the same on all ranks (BatchNorm: sync_batchnorm or broadcast_buffers), random numbers of dropout "
           "from a generator of the program's own, or batches that come in another order";
  }
  const double ratio = mean_of(found) / mean_of(expected);
  if (!explained(ratio, run_.layout).empty()) {
    return "the program divides or multiplies its loss by a number that follows from the layout, which the engine does "
           "already";
  }
  return "the batches are not the same: the program draws them from a generator that initialize() does not seed, or "
         "cuts its data by rank in an order that one rank does not repeat, or dropout draws other numbers. Use the "
         "engine's loader (.training_data), or the default generators";
}

std::string Judge::gradients(size_t step) {
  const RecordedTensors found = run_.tensors(step);
  const RecordedTensors expected = reference_.tensors(step);
  const std::string kind = kParityGradient;
  double all = 0;
  size_t elements = 0;
  for (const auto& [name, tensor] : expected.all()) {
    if (!name.starts_with(kind)) continue;
    for (size_t i = 0; i < tensor.count; ++i) all += tensor[i] * tensor[i];
    elements += tensor.count;
  }
  small_.clear();
  parameters_ = 0;
  size_t differing = 0;
  std::string first;
  Sums of_first;
  for (const auto& [name, tensor] : found.all()) {
    if (!name.starts_with(kind)) continue;
    ++parameters_;
    const Sums sums = sums_of(tensor, expected.find(name));
    const double share = all * static_cast<double>(tensor.count) / static_cast<double>(elements);
    const double floor = kSmallGradient * std::sqrt(share);
    if (std::sqrt(sums.expected) < floor) small_.push_back(name.substr(kind.size()));
    const double scale = std::max(std::sqrt(sums.expected), floor);
    const double relative = std::isnan(sums.difference) && std::isnan(sums.expected) && std::isnan(sums.found)
                                ? 0.0
                                : std::sqrt(sums.difference) / std::max(scale, 1e-30);
    if (relative <= grown(bounds_.gradient, step)) {
      largest_ = std::max(largest_, relative);
      continue;
    }
    if (++differing == 1) {
      first = name.substr(kind.size());
      of_first = sums;
    }
  }
  if (differing == 0) return {};
  return cat("step ", step, ": the gradient of ", first,
             differing == 1 ? std::string() : cat(" (and of ", differing - 1, " more of ", parameters_, ")"), " is ",
             of_first.is_multiple() ? ratio_text(of_first.ratio(), run_.layout)
                                    : cat("another one, of norm ", three_digits(std::sqrt(of_first.found)),
                                          " in place of ", three_digits(std::sqrt(of_first.expected))),
             of_first.is_multiple() ? " what it should be" : "",
             ". Likely: ", cause_of_gradients(of_first, differing, parameters_));
}

std::string Judge::cause_of_gradients(const Sums& sums, size_t differing, size_t all) const {
  const auto ranks = static_cast<double>(run_.layout.data_ranks);
  const auto accumulation = static_cast<double>(run_.layout.accumulation);
  const auto is = [&](double number) { return std::abs(sums.ratio() - number) <= kSameRatio * number; };
  const bool some = differing < all;
  if (!sums.is_multiple()) {
    return "the losses agree, so the sum over ranks is wrong: the reduction of this gradient is missing (a hook that "
           "leaves the parameter out, a parameter that another rank does not use), or goes over the wrong ranks";
  }
  if (std::abs(sums.ratio()) < kSameRatio)
    return "no rank's gradient reaches it: a hook or a reduction leaves the parameter out";
  if (ranks > 1 && is(ranks)) {
    return some ? "its gradients are added up over the ranks where their mean is meant, or reduced once more than "
                  "others (a tied weight, parameters of experts)"
                : "gradients are added up over the ranks where their mean is meant, or are reduced twice";
  }
  if (ranks > 1 && is(1 / ranks)) {
    return "the gradient is divided by the ranks twice, or the loss has been divided by them before backward()";
  }
  if (accumulation > 1 && is(1 / accumulation)) {
    return "the loss is divided by gradient_accumulation_steps twice: the engine does it, unless scale_wrt_gas = false";
  }
  if (accumulation > 1 && is(accumulation)) return "the loss is not divided by gradient_accumulation_steps";
  if (sums.ratio() > 1) {
    return some ? "it is counted more than once: a tied weight that is reduced at each of its places, or a hook that "
                  "the program adds to the engine's"
                : "all gradients are scaled: by a hook of the program's, or a loss that is multiplied";
  }
  return "a part of the ranks is left out of the mean, or the program scales the gradient";
}

std::string Judge::norm(size_t step) const {
  const auto& found = run_.steps[step - 1].norm;
  const auto& expected = reference_.steps[step - 1].norm;
  if (!found || !expected || near(*found, *expected, grown(bounds_.norm, step))) return {};
  return cat("step ", step, ": the gradient norm is ", *found, " in place of ", *expected, ", ",
             ratio_text(*found / *expected, run_.layout), ", and each gradient agrees. Likely: its squares are added ",
             "up without one axis of the ranks, or with copies that count twice; clipping is off by the same factor");
}

std::string Judge::updates(size_t step) const {
  const RecordedTensors found = run_.tensors(step);
  const RecordedTensors found_before = run_.tensors(step - 1);
  const RecordedTensors expected = reference_.tensors(step);
  const RecordedTensors expected_before = reference_.tensors(step - 1);
  const std::string kind = kParityWeight;
  for (const auto& [name, tensor] : found.all()) {
    if (!name.starts_with(kind)) continue;
    const std::string parameter = name.substr(kind.size());
    if (std::find(small_.begin(), small_.end(), parameter) != small_.end()) continue;
    const RecordedTensor* const before = found_before.find(name);
    const RecordedTensor* const other = expected.find(name);
    const RecordedTensor* const other_before = expected_before.find(name);
    if (before == nullptr || other == nullptr || other_before == nullptr) continue;  // gradients have told it
    Sums sums;
    double weights = 0;
    for (size_t i = 0; i < tensor.count; ++i) {
      sums.add(tensor[i] - (*before)[i], (*other)[i] - (*other_before)[i]);
      weights += tensor[i] * tensor[i];
    }
    const double allowed = grown(bounds_.update, step) * std::sqrt(sums.expected) + kRounding * std::sqrt(weights);
    if (std::sqrt(sums.difference) <= allowed || std::isnan(weights)) continue;
    return cat(
        "step ", step, ": the gradients agree, and the update of ", parameter, " is ",
        sums.is_multiple() ? cat(ratio_text(sums.ratio(), run_.layout), " what it should be")
                           : cat("another one, of norm ", three_digits(std::sqrt(sums.found)), " in place of ",
                                 three_digits(std::sqrt(sums.expected))),
        ". Likely: an optimizer state or a step count that was not loaded, a learning rate or weight decay that ",
        "differs between ranks, or clipping by another norm");
  }
  return {};
}

ParityVerdict Judge::verdict() {
  const size_t steps = std::min(run_.steps.size(), reference_.steps.size());
  std::string what = start_weights();
  for (size_t step = 1; step <= steps && what.empty(); ++step) {
    what = loss(step);
    if (what.empty()) what = gradients(step);
    if (what.empty()) what = norm(step);
    if (what.empty() && run_.steps[step - 1].applied != reference_.steps[step - 1].applied) {
      what = cat("step ", step, ": it was ", run_.steps[step - 1].applied ? "applied" : "skipped", ", and on one rank ",
                 reference_.steps[step - 1].applied ? "applied" : "skipped",
                 ". Likely: a gradient overflows under one of the two loss scales");
    }
    if (what.empty()) what = updates(step);
  }
  const RecordedLayout& layout = run_.layout;
  const std::string runs = cat(layout.data_ranks * layout.tensor_ranks, " ranks (", layout.data_ranks,
                               " data-parallel, stage ", layout.stage, ", ", layout.dtype, ") and one rank");
  if (!what.empty()) return {.equal = false, .text = cat("parity: different, ", runs, ": ", what)};
  return {.equal = true,
          .text = cat("parity: equal, ", runs, ": ", steps, steps == 1 ? " step" : " steps", ", ", parameters_,
                      " parameters; gradients differ by at most ", three_digits(largest_), " of their norm (bound ",
                      bounds_.gradient, " in the first step)")};
}

}  // namespace

ParityBounds bounds_of(const std::string& dtype) {
  if (dtype == "bf16") return {.loss = 0.02, .norm = 0.05, .gradient = 0.1, .update = 0.5};
  if (dtype == "fp16") return {.loss = 0.005, .norm = 0.02, .gradient = 0.05, .update = 0.3};
  return {.loss = 1e-4, .norm = 1e-3, .gradient = 2e-3, .update = 0.05};
}

ParityVerdict judge_parity(const RecordedRun& run, const RecordedRun& reference) {
  return Judge(run, reference).verdict();
}

}  // namespace ds
