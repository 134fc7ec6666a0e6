#include "config/parse_steps.h"

#include <algorithm>

#include "core/check.h"

namespace ds::engine::config {
namespace {

constexpr const char* kTrain = "train_batch_size";
constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
constexpr const char* kAccumulation = "gradient_accumulation_steps";

bool positive(const char* key, const std::optional<int64_t>& value, JsonProblems& problems) {
  if (!value || *value > 0) return true;
  problems.error(cat("/", key), cat("expected an integer > 0, found ", *value));
  return false;
}

// "train_batch_size (line 2) 20"
std::string described(const char* key, const std::optional<int64_t>& given, int64_t value,
                      const JsonProblems& problems) {
  return given ? cat(problems.place(cat("/", key)), " ", value) : cat(key, " ", value, " (derived)");
}

// Multiples of `unit` at or next to `value`; above the largest number there is none.
std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  int64_t above = 0;
  if (__builtin_add_overflow(below, unit, &above)) return cat(below);
  return below > 0 ? cat(below, " or ", above) : cat(above);
}

// Nothing where the product does not fit.
std::optional<int64_t> product_of(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional(result);
}

// Every change of one number that makes the three fit.
std::string suggestions(const GivenBatchSizes& given, const BatchSizes& sizes, int64_t dp) {
  std::string text;
  const auto add = [&text](const char* key, const std::string& value) {
    text += cat(text.empty() ? "set " : ", or ", key, " to ", value);
  };
  if (given.micro && given.accumulation) {
    const int64_t fitting = *given.micro * *given.accumulation * dp;
    add(kTrain, cat(fitting));
    if (sizes.train % (*given.micro * dp) == 0) add(kAccumulation, cat(sizes.train / (*given.micro * dp)));
    if (sizes.train % (*given.accumulation * dp) == 0) add(kMicro, cat(sizes.train / (*given.accumulation * dp)));
  } else {
    const auto unit = product_of(given.micro.value_or(given.accumulation.value_or(1)), dp);
    if (unit) add(kTrain, nearest_multiples(sizes.train, *unit));
  }
  const int64_t unit = given.micro && given.accumulation ? *given.micro * *given.accumulation
                                                         : given.micro.value_or(given.accumulation.value_or(1));
  if (sizes.train % unit == 0 && !(given.micro && given.accumulation && sizes.train / unit == dp)) {
    text += cat(", or run on ", sizes.train / unit, " data-parallel rank", sizes.train / unit == 1 ? "" : "s");
  }
  if (sizes.micro == 0 || sizes.accumulation == 0) text += "; the batch is too small for so many ranks";
  return text;
}

std::string batches_in_words(int64_t dp, int64_t sequence) {
  if (sequence == 1) return dp == 1 ? " rank" : " ranks";
  return cat(dp == 1 ? " batch" : " batches", " at a time, each shared by ", sequence,
             " ranks (sequence_parallel_size), which count once");
}

BatchSizes derive(const GivenBatchSizes& given, int64_t dp) {
  BatchSizes sizes{given.train.value_or(0), given.micro.value_or(0), given.accumulation.value_or(0)};
  if (given.train) {
    if (given.micro && !given.accumulation) sizes.accumulation = sizes.train / sizes.micro / dp;
    if (!given.micro) {
      sizes.accumulation = given.accumulation.value_or(1);
      sizes.micro = sizes.train / dp / sizes.accumulation;
    }
  } else {
    sizes.accumulation = given.accumulation.value_or(1);
    // A product that does not fit is reported by the caller.
    int64_t product = 0;
    const bool fits = !__builtin_mul_overflow(sizes.micro, sizes.accumulation, &product) &&
                      !__builtin_mul_overflow(product, dp, &sizes.train);
    if (!fits) sizes.train = 0;
  }
  return sizes;
}

}  // namespace

BatchSizes resolve_batch_sizes(const GivenBatchSizes& given, int64_t dp_world_size, JsonProblems& problems) {
  const bool all_positive = static_cast<int>(positive(kTrain, given.train, problems)) &
                            static_cast<int>(positive(kMicro, given.micro, problems)) &
                            static_cast<int>(positive(kAccumulation, given.accumulation, problems));
  if (!all_positive) return {};
  if (!given.train && !given.micro) {
    problems.error(cat("/", kTrain),
                   given.left_auto ? cat("is \"auto\" (or ", kMicro,
                                         " is) and the program gives neither; write a number for one of "
                                         "the two, or set AutoValues")
                                   : cat("expected this key or ", kMicro, ", found neither; add \"", kMicro, "\": N"));
    return {};
  }
  const BatchSizes sizes = derive(given, dp_world_size);
  int64_t product = 0;
  const bool overflow = __builtin_mul_overflow(sizes.micro, sizes.accumulation, &product) ||
                        __builtin_mul_overflow(product, dp_world_size, &product);
  if (!overflow && sizes.train == product && product > 0) return sizes;
  if (overflow) {
    problems.error(cat("/", given.micro ? kMicro : kTrain),
                   "batch sizes this large do not fit 64 bits; use smaller ones");
    return {};
  }
  const char* blamed = given.train ? kTrain : kMicro;
  problems.error(
      cat("/", blamed),
      cat("expected ", kTrain, " = ", kMicro, " x ", kAccumulation, " x data-parallel ranks, found ", sizes.train,
          " != ", sizes.micro, " x ", sizes.accumulation, " x ", dp_world_size, " from ",
          described(kTrain, given.train, sizes.train, problems), ", ",
          described(kMicro, given.micro, sizes.micro, problems), ", ",
          described(kAccumulation, given.accumulation, sizes.accumulation, problems), ", ", dp_world_size,
          batches_in_words(dp_world_size, given.sequence_ranks), "; ", suggestions(given, sizes, dp_world_size)));
  return {};
}

}  // namespace ds::engine::config
