#include "core/parity/parity_judge.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/parity/run_differences.h"
#include "core/text.h"

namespace ds {
namespace {

// The largest relative distance of a ratio from the number that explains it.
constexpr double kSameRatio = 0.02;
// The largest part of a tensor's norm that may be left when it is told as such a multiple of another.
constexpr double kSameDirection = 0.05;
// The fewest micro-batches whose losses, all of them smaller, are no chance.
constexpr size_t kLeastSmaller = 4;

std::string three_digits(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::general, 3).ptr;
  return {text.data(), end};
}

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

// Whether a tensor is a multiple of the other. By a ratio that nothing explains it is one to the rounding, `bound`:
// else the mean over some of the ranks would pass for it, since batches of one data set have like gradients.
bool is_multiple(const PairSums& sums, const RecordedLayout& layout, double bound) {
  const bool known = std::abs(sums.ratio()) < kSameRatio || !explained(sums.ratio(), layout).empty();
  return sums.rest() <= (known ? kSameDirection : std::min(bound, kSameDirection));
}

bool near(double a, double b, double bound) { return relative_difference(a, b) <= bound; }

bool all_near(const std::vector<double>& a, const std::vector<double>& b, double bound) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [bound](double x, double y) { return near(x, y, bound); });
}

// Whether each micro-batch has a smaller loss than on one rank, which takes those of the ranks in turn, and not all by
// one factor.
bool all_smaller(const std::vector<std::vector<double>>& of_ranks, const std::vector<double>& expected) {
  double least = 1;
  double most = 0;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    for (size_t i = 0; i < of_ranks[rank].size(); ++i) {
      const size_t place = i * of_ranks.size() + rank;
      if (place >= expected.size() || expected[place] <= 0 || of_ranks[rank][i] <= 0) return false;
      const double ratio = of_ranks[rank][i] / expected[place];
      least = std::min(least, ratio);
      most = std::max(most, ratio);
    }
  }
  return expected.size() >= kLeastSmaller && most < 1 && least < most * (1 - kSameRatio);
}

class Judge {
 public:
  Judge(const RecordedRun& run, const RecordedRun& reference, ChosenBounds bounds)
      : run_(run), reference_(reference), bounds_(std::move(bounds)) {}

  ParityVerdict verdict();

 private:
  const ParityBounds& bound(size_t step) const { return bounds_.steps[step - 1]; }
  // Each of these returns the sentence on what differs, or "".
  std::string start_weights() const;
  std::string loss(size_t step) const;
  std::string gradients(size_t step);
  std::string norm(size_t step) const;
  std::string updates(size_t step) const;
  std::string cause_of_loss(size_t step) const;
  std::string cause_of_gradients(const PairSums& sums, bool multiple, bool some) const;

  const RecordedRun& run_;
  const RecordedRun& reference_;
  ChosenBounds bounds_;
  double largest_ = 0;                          // relative difference of a gradient
  std::vector<ParameterDifference> gradients_;  // of the step
};

std::string Judge::start_weights() const {
  for (const ParameterDifference& one : start_differences(run_, reference_)) {
    if (one.relative <= bound(1).gradient) continue;
    return cat("before the first step: ", one.name,
               " begins with other values. Likely: the program draws its start values ",
               "from numbers that differ from process to process (the time, a thread), or loads another file; draw ",
               "them from a fixed seed before initialize()");
  }
  return {};
}

std::string Judge::loss(size_t step) const {
  const double found = mean_loss(run_.steps[step - 1]);
  const double expected = mean_loss(reference_.steps[step - 1]);
  if (near(found, expected, bound(step).loss)) return {};
  return cat("step ", step, ": the loss is ", found, " in place of ", expected, ", ",
             ratio_text(found / expected, run_.layout), ". Likely: ", cause_of_loss(step));
}

std::string Judge::cause_of_loss(size_t step) const {
  const auto& of_ranks = run_.steps[step - 1].losses;
  const std::vector<double> found = joined(of_ranks);
  const std::vector<double> expected = joined(reference_.steps[step - 1].losses);
  const double most = bound(step).loss;
  const bool repeats = of_ranks.size() > 1 && std::all_of(of_ranks.begin(), of_ranks.end(), [&](const auto& one) {
                         return all_near(one, of_ranks.front(), most);
                       });
  if (repeats) {
    return "all data-parallel ranks got the data of one rank: cut the data by engine->communicator().rank() and "
           "engine->dp_world_size()";
  }
  std::vector<double> a = found;
  std::vector<double> b = expected;
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  if (all_near(a, b, most)) {
    return "the micro-batches are the same, and the mean over them is not: padding or empty tokens are counted in the "
           "mean, or micro-batches of unlike sizes weigh alike; use backward_mean(sum, count)";
  }
  if (step > 1) {
    return "gradients and weights before it agree, so something else that forward reads has parted: buffers that are "
           "not the same on all ranks (BatchNorm: sync_batchnorm or broadcast_buffers), random numbers of dropout "
           "from a generator of the program's own, or batches that come in another order";
  }
  if (all_smaller(of_ranks, expected)) {
    return "each micro-batch has a smaller loss than on one rank, by factors of its own: padding or empty tokens are "
           "counted in the mean, more of them here; use backward_mean(sum, count). Or the batches are not the same";
  }
  const double ratio = mean_of(found) / mean_of(expected);
  if (!explained(ratio, run_.layout).empty()) {
    return "the program divides or multiplies its loss by a number that follows from the layout, which the engine does "
           "already";
  }
  return "the batches are not the same: the program draws them from a generator that initialize() does not seed, or "
         "cuts its data by rank in an order that one rank does not repeat, or dropout draws other numbers. Use the "
         "engine's loader (.training_data) or the default generators; or give batches to engine->forward() or "
         "train_batch(source), and start with --replay";
}

std::string Judge::gradients(size_t step) {
  gradients_ = gradient_differences(run_, reference_, step);
  size_t differing = 0;
  const ParameterDifference* first = nullptr;
  for (const ParameterDifference& one : gradients_) {
    if (one.relative <= bound(step).gradient) {
      largest_ = std::max(largest_, one.relative);
    } else if (++differing == 1) {
      first = &one;
    }
  }
  if (first == nullptr) return {};
  const PairSums& sums = first->sums;
  const bool multiple = is_multiple(sums, run_.layout, bound(step).gradient);
  return cat("step ", step, ": the gradient of ", first->name,
             differing == 1 ? std::string() : cat(" (and of ", differing - 1, " more of ", gradients_.size(), ")"),
             " is ",
             multiple ? ratio_text(sums.ratio(), run_.layout)
                      : cat("another one, of norm ", three_digits(std::sqrt(sums.found)), " in place of ",
                            three_digits(std::sqrt(sums.expected))),
             multiple ? " what it should be" : "",
             ". Likely: ", cause_of_gradients(sums, multiple, differing < gradients_.size()));
}

std::string Judge::cause_of_gradients(const PairSums& sums, bool multiple, bool some) const {
  const auto ranks = static_cast<double>(run_.layout.data_ranks);
  const auto accumulation = static_cast<double>(run_.layout.accumulation);
  const auto is = [&](double number) { return std::abs(sums.ratio() - number) <= kSameRatio * number; };
  if (!multiple) {
    return cat("the losses agree, so the sum over ranks is wrong: the reduction of this gradient is missing (a hook ",
               "that leaves the parameter out, a parameter that another rank does not use), or goes over the wrong ",
               "ranks", some ? " (parameters of experts that are averaged over a group that is not theirs)" : "");
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
  if (!found || !expected || near(*found, *expected, bound(step).norm)) return {};
  return cat("step ", step, ": the gradient norm is ", *found, " in place of ", *expected, ", ",
             ratio_text(*found / *expected, run_.layout), ", and each gradient agrees. Likely: its squares are added ",
             "up without one axis of the ranks, or with copies that count twice; clipping is off by the same factor");
}

std::string Judge::updates(size_t step) const {
  for (const ParameterDifference& one : update_differences(run_, reference_, step, gradients_)) {
    if (one.relative <= bound(step).update) continue;
    const PairSums& sums = one.sums;
    return cat("step ", step, ": the gradients agree, and the update of ", one.name, " is ",
               is_multiple(sums, run_.layout, bound(step).update)
                   ? cat(ratio_text(sums.ratio(), run_.layout), " what it should be")
                   : cat("another one, of norm ", three_digits(std::sqrt(sums.found)), " in place of ",
                         three_digits(std::sqrt(sums.expected))),
               ". Likely: an optimizer state or a step count that was not loaded, a learning rate or weight decay ",
               "that differs between ranks, or clipping by another norm");
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
  const std::string runs =
      cat(layout.ranks(), layout.ranks() == 1 ? " rank (" : " ranks (", layout.data_ranks, " data-parallel, ",
          layout.pipe_ranks > 1 ? cat("pipe ", layout.pipe_ranks, ", ") : std::string(),
          layout.tensor_ranks > 1 ? cat("tensor ", layout.tensor_ranks, ", ") : std::string(), "stage ", layout.stage,
          ", ", layout.dtype, ") and one rank");
  const std::string bounds =
      cat("bound of a gradient in the first step: ", three_digits(bound(1).gradient), ", ", bounds_.source);
  if (!what.empty()) return {.equal = false, .text = cat("parity: different, ", runs, ": ", what, " (", bounds, ")")};
  return {.equal = true,
          .text = cat("parity: equal, ", runs, ": ", steps, steps == 1 ? " step" : " steps", ", ", gradients_.size(),
                      " parameters; gradients differ by at most ", three_digits(largest_), " of their norm (", bounds,
                      ")")};
}

}  // namespace

ParityVerdict judge_parity(const RecordedRun& run, const RecordedRun& reference, ChosenBounds bounds) {
  return Judge(run, reference, std::move(bounds)).verdict();
}

}  // namespace ds
