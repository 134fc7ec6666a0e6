#include "engine/report/logged_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/device/readback.h"
#include "core/log.h"
#include "core/tensor_check.h"
#include "core/text_hash.h"

namespace ds::engine {
namespace {

// The names of the engine's own points, behind "Train/Samples/".
constexpr std::array<const char*, 13> kOwnNames = {"train_loss",
                                                   "lr",
                                                   "loss_scale",
                                                   "grad_norm",
                                                   "samples_per_second",
                                                   "tokens_per_second",
                                                   "mfu",
                                                   "mfu_causal",
                                                   "resident_bytes",
                                                   "device_peak_bytes",
                                                   "elapsed_time_ms_forward",
                                                   "elapsed_time_ms_backward",
                                                   "elapsed_time_ms_step"};

const char* name_of(Reduce reduce) {
  switch (reduce) {
    case Reduce::kMean:
      return "mean";
    case Reduce::kSum:
      return "sum";
    case Reduce::kMin:
      return "min";
    case Reduce::kMax:
      return "max";
  }
  return "";
}

std::string words_of(const LogOptions& options) {
  return cat(options.sync_dist ? "sync_dist, " : "", name_of(options.reduce), options.on_epoch ? ", on_epoch" : "");
}

// A value that is not a number stays, as in a sum.
double joined(double a, double b, Reduce reduce) {
  if (reduce == Reduce::kMean || reduce == Reduce::kSum) return a + b;
  if (std::isnan(a) || std::isnan(b)) return a + b;
  return reduce == Reduce::kMin ? std::min(a, b) : std::max(a, b);
}

at::Tensor joined(const at::Tensor& a, const at::Tensor& b, Reduce reduce) {
  if (reduce == Reduce::kMean || reduce == Reduce::kSum) return a.add(b);
  return reduce == Reduce::kMin ? at::minimum(a, b) : at::maximum(a, b);
}

}  // namespace

LoggedValues::~LoggedValues() {
  if (points_.empty() || model_.ranks.world->rank() != 0) return;
  log::warning("engine->log(): ", points_.size(), " points were not written before the engine ended, the first of ",
               points_.front().name, "; call engine::end_epoch(*engine) at the end of a run");
}

LoggedValues::Point& LoggedValues::open_point(const std::string& name, const LogOptions& options) {
  require(!name.empty(), "engine->log(): expected a name, found an empty one");
  constexpr std::string_view kOwn = "Train/Samples/";
  if (name.starts_with(kOwn)) {
    const std::string_view rest = std::string_view(name).substr(kOwn.size());
    require(std::find(kOwnNames.begin(), kOwnNames.end(), rest) == kOwnNames.end(), "engine->log(\"", name,
            "\"): expected a name of the program's own, found one that the engine writes itself");
  }
  const auto [known, is_new] = names_.try_emplace(name, options);
  require(is_new || known->second == options, "engine->log(\"", name,
          "\"): expected the options of the calls before, (", words_of(known->second), "), found (", words_of(options),
          ")");
  auto point = std::find_if(points_.begin(), points_.end(),
                            [&](const Point& other) { return !other.place && other.name == name; });
  if (point == points_.end()) point = points_.insert(points_.end(), Point{.name = name, .options = options});
  ++point->calls;
  return *point;
}

void LoggedValues::add(const std::string& name, double value, const LogOptions& options) {
  Point& point = open_point(name, options);
  point.number = point.number ? joined(*point.number, value, options.reduce) : value;
}

void LoggedValues::add(const std::string& name, const at::Tensor& value, const LogOptions& options) {
  require(value.defined() && value.numel() == 1 && !value.is_complex() && value.layout() == at::kStrided,
          "engine->log(\"", name, "\"): expected one real number, found ", describe(value));
  const at::NoGradGuard no_grad;
  if (value.is_cpu()) return add(name, value.detach().to(at::kDouble).item<double>(), options);
  const at::Tensor own =
      value.detach().reshape({}).to(model_.ranks.device, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  Point& point = open_point(name, options);
  point.on_device = point.on_device.defined() ? joined(point.on_device, own, options.reduce) : own;
}

void LoggedValues::step_ends(int64_t place) {
  for (Point& point : points_) {
    if (!point.place && !point.options.on_epoch) point.place = place;
  }
}

std::vector<profiling::Event> LoggedValues::take(std::optional<int64_t> epoch_place) {
  std::vector<Point> own;
  std::vector<Point> shared;
  std::vector<Point> later;
  for (Point& point : points_) {
    if (epoch_place && !point.place) point.place = epoch_place;
    const bool is_shared = point.options.sync_dist && model_.ranks.part->size() > 1;
    (!point.place ? later : is_shared ? shared : own).push_back(std::move(point));
  }
  points_ = std::move(later);
  if (model_.ranks.part->size() > 1) require_same_names(shared);
  std::vector<profiling::Event> events;
  const bool is_first = model_.ranks.world->rank() == 0;
  if (!shared.empty()) {
    const at::Tensor all = values_of(shared, /*all_ranks=*/true);
    const auto* const values = all.const_data_ptr<double>();
    const int ranks = model_.ranks.part->size();
    for (size_t i = 0; is_first && i < shared.size(); ++i) {
      const Reduce reduce = shared[i].options.reduce;
      double value = values[i];
      for (int rank = 1; rank < ranks; ++rank) {
        value = joined(value, values[static_cast<size_t>(rank) * shared.size() + i], reduce);
      }
      if (reduce == Reduce::kMean) value /= ranks;
      events.push_back({.name = shared[i].name, .value = value, .step = *shared[i].place});
    }
  }
  if (!is_first || own.empty()) return events;
  const at::Tensor values = values_of(own, /*all_ranks=*/false);
  for (size_t i = 0; i < own.size(); ++i) {
    events.push_back({.name = own[i].name, .value = values.const_data_ptr<double>()[i], .step = *own[i].place});
  }
  return events;
}

void LoggedValues::require_same_names(const std::vector<Point>& shared) const {
  std::string list;
  for (const Point& point : shared) {
    list += cat(list.empty() ? "" : "; ", point.name, " (", words_of(point.options), ") at ", *point.place);
  }
  comm::Communicator& ranks = *model_.ranks.part;
  const auto digest = static_cast<int64_t>(fnv1a(list) >> 1);
  if (comm::same_number_on_all_ranks(digest, model_.ranks.device, ranks, "names of logged values")) return;
  const std::vector<std::string> lists =
      comm::texts_of_ranks(list.empty() ? "nothing" : list, model_.ranks.device, ranks, "lists of logged values");
  std::string all;
  for (size_t rank = 0; rank < lists.size(); ++rank) all += cat(" Rank ", rank, ": ", lists[rank], ".");
  throw UsageError(
      cat("engine->log(): ranks have logged other names with sync_dist, or in another order; expected the ",
          "same on every rank, found (name, options, samples so far)", all, " Log a value that one rank ",
          "alone has without sync_dist. The values are not written (this is rank ", ranks.rank(), ")"));
}

at::Tensor LoggedValues::values_of(const std::vector<Point>& points, bool all_ranks) const {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(points.size());
  const at::Tensor host = at::zeros({count}, at::kDouble);
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> places;
  for (size_t i = 0; i < points.size(); ++i) {
    const Point& point = points[i];
    const double calls = point.options.reduce == Reduce::kMean ? static_cast<double>(point.calls) : 1.0;
    if (!point.on_device.defined()) {
      host.mutable_data_ptr<double>()[i] = *point.number / calls;
      continue;
    }
    at::Tensor value = point.on_device;
    if (point.number) value = joined(value, at::scalar_tensor(*point.number, value.options()), point.options.reduce);
    tensors.push_back(value.div(calls));
    places.push_back(static_cast<int64_t>(i));
  }
  at::Tensor values = host;
  if (all_ranks || !tensors.empty()) values = sent_to(model_.ranks.device, host);
  if (!tensors.empty()) {
    const at::Tensor index = sent_to(model_.ranks.device, at::tensor(places, at::kLong));
    values = values.index_copy(0, index, at::stack(tensors));
  }
  if (all_ranks) {
    comm::Communicator& ranks = *model_.ranks.part;
    const at::Tensor all = at::empty({count * ranks.size()}, values.options());
    ranks.all_gather(all, values, "logged values").wait();
    values = all;
  }
  return values.to(at::kCPU);
}

}  // namespace ds::engine
