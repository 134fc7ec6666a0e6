#include "engine/update/micro_batch_digests.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/device/readback.h"
#include "core/text_hash.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

constexpr size_t kKinds = 2;  // inputs and labels
constexpr int64_t kLowBits = 0xFFFFFFFF;
// The tolerance for floating-point numbers that two hosts have computed, relative to their magnitude; random draws
// differ by more.
constexpr double kRounding = 1e-5;

// The places of the numbers of one kind. Of the last stage all up to kMagnitude are taken away.
struct DigestPlace {
  enum : int64_t { kHas, kDigest, kSum, kMagnitude, kGiven, kPlaces };
};
// The places of the sums over ranks: those of DigestPlace, then digest and sum once more, with factors that add up to
// nothing over the ranks of a tensor axis.
struct SumPlace {
  enum : int64_t { kAxisDigest = DigestPlace::kPlaces, kAxisSum, kPlaces };
};

at::Tensor numbers_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  const auto on_host = at::TensorOptions().dtype(at::kDouble);
  // A source that leaves a tensor out may give an empty one in its place.
  const auto left_out = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  if (std::all_of(tensors.begin(), tensors.end(), left_out)) return at::zeros({DigestPlace::kPlaces}, on_host);
  const auto options = on_host.device(tensors.front().device());
  at::Tensor digest = at::zeros({1}, options.dtype(at::kLong));
  at::Tensor sums = at::zeros({2}, options);
  int64_t factor = 1;
  for (const at::Tensor& tensor : tensors) {
    factor += 2;  // tensors that have changed places differ
    if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized()) continue;
    const std::string shape = cat(c10::toString(tensor.scalar_type()), tensor.sizes());
    digest.add_(static_cast<int64_t>(fnv1a(shape) >> 32) * factor);
    if (tensor.is_floating_point() || tensor.is_complex()) {
      const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
      sums.add_(zero::device_sums_of(real).to(options.device()), factor);
    } else {
      digest.add_(zero::device_digest_of(tensor).to(options.device()), factor);
    }
  }
  const at::Tensor one = at::ones({1}, options);
  return at::cat({one, digest.bitwise_and(kLowBits).to(at::kDouble), sums, one});
}

bool differ_beyond_rounding(double digests, double sums, double magnitude) {
  return digests != 0 || std::abs(sums) > kRounding * magnitude;
}

// The numbers that a rank tells of one kind of one micro-batch, once ranks differ.
struct Told {
  enum : size_t { kPipeline, kStage, kHas, kDigest, kSum, kMagnitude, kNumbers };
};

// Whether two ranks that are compared tell other numbers: along an axis ranks of one stage, which reads what is told,
// else a first and a last stage.
bool tells_other(const int64_t* one, const int64_t* other, bool along_axis) {
  const bool compared =
      along_axis ? one[Told::kStage] == other[Told::kStage] : one[Told::kStage] == 1 && other[Told::kStage] == -1;
  if (!compared || one[Told::kPipeline] != other[Told::kPipeline] || one[Told::kHas] == 0 || other[Told::kHas] == 0) {
    return false;
  }
  const auto value = [](const int64_t* told, size_t place) { return std::bit_cast<double>(told[place]); };
  return differ_beyond_rounding(static_cast<double>(one[Told::kDigest] - other[Told::kDigest]),
                                value(one, Told::kSum) - value(other, Told::kSum),
                                value(one, Told::kMagnitude) + value(other, Told::kMagnitude));
}

// "ranks 0 and 1", the first pair that differs.
std::string differing_ranks(const std::vector<int64_t>& told, bool along_axis) {
  const size_t ranks = told.size() / Told::kNumbers;
  for (size_t one = 0; one < ranks; ++one) {
    for (size_t other = 0; other < ranks; ++other) {
      if (tells_other(told.data() + one * Told::kNumbers, told.data() + other * Told::kNumbers, along_axis)) {
        return cat("ranks ", one, " and ", other);
      }
    }
  }
  return {};
}

}  // namespace

MicroBatchDigests::MicroBatchDigests(int micro_batches, Stage stage, AxisPlace axis)
    : stage_(stage),
      axis_(axis),
      rows_(kKinds * static_cast<size_t>(micro_batches),
            at::zeros({DigestPlace::kPlaces}, at::TensorOptions().dtype(at::kDouble))) {}

void MicroBatchDigests::see(const pipeline::MicroBatch& batch) {
  if ((stage_ == Stage::kOther && axis_.ranks == 1) || seen_ + kKinds > rows_.size()) return;
  rows_[seen_++] = numbers_of(batch.inputs);
  rows_[seen_++] = numbers_of(batch.labels);
}

// Equal numbers of all ranks of an axis add up to nothing. 0: the stage does not read what the row is about.
double MicroBatchDigests::axis_factor(size_t row) const {
  const bool inputs = row % kKinds == 0;
  if (stage_ == (inputs ? Stage::kLast : Stage::kFirst)) return 0;
  return axis_.rank == 0 ? axis_.ranks - 1 : -1;
}

at::Tensor MicroBatchDigests::summable(at::Device device) const {
  const at::NoGradGuard no_grad;
  const bool on_host = std::all_of(rows_.begin(), rows_.end(), [](const at::Tensor& row) { return row.is_cpu(); });
  std::vector<at::Tensor> rows = rows_;
  if (!on_host) {
    for (at::Tensor& row : rows) row = row.is_cpu() ? sent_to(device, row) : row.to(device);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = at::cat({rows[i], rows[i].narrow(0, DigestPlace::kDigest, 2) * axis_factor(i)});
  }
  at::Tensor numbers = at::stack(rows);
  // The last stage's are taken away from those of the first; magnitudes are added.
  numbers.narrow(1, DigestPlace::kHas, DigestPlace::kMagnitude).mul_(static_cast<int>(stage_));
  numbers = numbers.flatten();
  return on_host ? sent_to(device, numbers) : numbers;
}

std::optional<MicroBatchDigests::Difference> MicroBatchDigests::first_difference(const at::Tensor& sums) const {
  const auto* const numbers = sums.const_data_ptr<double>();
  const auto row = [&](size_t i) { return numbers + i * static_cast<size_t>(SumPlace::kPlaces); };
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (differ_beyond_rounding(row(i)[SumPlace::kAxisDigest], row(i)[SumPlace::kAxisSum],
                               row(i)[DigestPlace::kMagnitude])) {
      return Difference{.row = i, .along_axis = true};
    }
  }
  const auto compared = [&](size_t i) { return row(i)[DigestPlace::kHas] == 0 && row(i)[DigestPlace::kGiven] > 0; };
  for (size_t i = 0; i < rows_.size(); ++i) {
    // The last stage reads no inputs. Where labels are the same, it may have drawn inputs of its own.
    if (i % kKinds == 0 && compared(i + 1)) continue;
    if (compared(i) && differ_beyond_rounding(row(i)[DigestPlace::kDigest], row(i)[DigestPlace::kSum],
                                              row(i)[DigestPlace::kMagnitude])) {
      return Difference{.row = i};
    }
  }
  return std::nullopt;
}

bool MicroBatchDigests::differ_along_axis(const at::Tensor& sums) const {
  const std::optional<Difference> found = first_difference(sums);
  return found && found->along_axis;
}

void MicroBatchDigests::require_same(const at::Tensor& sums, int pipeline, comm::Communicator& world, at::Device device,
                                     const char* outcome) const {
  const std::optional<Difference> found = first_difference(sums);
  if (!found) return;
  const at::Tensor own = rows_[found->row].cpu();
  const auto* const numbers = own.const_data_ptr<double>();
  const auto bits = [&](int64_t at) { return std::bit_cast<int64_t>(numbers[at]); };
  const bool reads = !found->along_axis || axis_factor(found->row) != 0;
  const std::vector<int64_t> told = comm::numbers_of_ranks(
      world, device,
      {pipeline, static_cast<int>(stage_), reads ? static_cast<int64_t>(numbers[DigestPlace::kHas]) : 0,
       static_cast<int64_t>(numbers[DigestPlace::kDigest]), bits(DigestPlace::kSum), bits(DigestPlace::kMagnitude)},
      "digests of a micro-batch");
  const std::string ranks = differing_ranks(told, found->along_axis);
  const char* const kind = found->row % kKinds == 0 ? "inputs" : "labels";
  const std::string place = cat(" for micro-batch ", found->row / kKinds, " of the batch. ");
  if (found->along_axis) {
    throw UsageError(cat(ranks.empty() ? "ranks" : ranks, " of one tensor axis took different ", kind, place,
                         "Each of the ", axis_.ranks, " ranks of an axis has a part of the layers: they run on the ",
                         "same micro-batches. Read by engine->communicator().rank(), the data-parallel rank, not by ",
                         "the rank of the job, and draw random numbers from generators that are seeded alike. ",
                         outcome));
  }
  throw UsageError(cat(
      ranks, ranks.empty() ? "" : ", ", "the first and the last stage of a pipeline took different ", kind, place,
      "Each asks its own source or dataset, and both have to get the same micro-batches: the first ",
      "has the inputs, the last one the labels. Read by engine->communicator().rank(), the data-parallel rank, not ",
      "by the rank of the job. Draw random numbers from a generator that is seeded alike on both (by that rank and ",
      "the step, or by the number of the sample), not from the default one. A stage may leave out what it does not ",
      "use: labels on the first, inputs on the last. ", outcome));
}

}  // namespace ds::engine
