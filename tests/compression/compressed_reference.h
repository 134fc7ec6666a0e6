// The compressed optimizers once more, for all ranks in one place: loops over plain arrays, from the formulas of the
// papers (and compression/*.h), without messages, buckets and kernels. What they share with the code under test is the
// steps before the freeze, which are AdamW's and LAMB's own and have tests of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace ds::compression::reference {

using Values = std::vector<float>;

// The model as one array: parameter i in [begin, end); what lies between parameters is padding.
struct Layout {
  std::vector<std::pair<int64_t, int64_t>> parameters;
  int64_t numel = 0;
};

inline float root_mean_square(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return static_cast<float>(std::sqrt(sum / static_cast<double>(count)));
}

inline float signed_scale(float value, float scale) { return value >= 0 ? scale : -scale; }

// What all ranks hold after they compressed `values[rank]`, with the errors of each as worker and as server.
class Exchange {
 public:
  Exchange(Layout layout, int world) : layout_(std::move(layout)), world_(world) {
    worker_error_.assign(static_cast<size_t>(world), Values(static_cast<size_t>(layout_.numel), 0.0F));
    server_error_.assign(static_cast<size_t>(layout_.numel), 0.0F);
    part_ = ((layout_.numel + world - 1) / world + 7) / 8 * 8;
  }

  Values mean(const std::vector<Values>& values) {
    if (world_ == 1) return values[0];
    Values sum = server_error_;
    for (int rank = 0; rank < world_; ++rank) {
      Values& error = worker_error_[static_cast<size_t>(rank)];
      for (const auto& [begin, end] : layout_.parameters) {
        for (int64_t i = begin; i < end; ++i) error[i] += values[static_cast<size_t>(rank)][i];
        const float scale = root_mean_square(&error[begin], end - begin);
        const float share = scale / static_cast<float>(world_);
        for (int64_t i = begin; i < end; ++i) {
          sum[i] += signed_scale(error[i], share);
          error[i] -= signed_scale(error[i], scale);
        }
      }
    }
    Values result(static_cast<size_t>(layout_.numel), 0.0F);
    for (int64_t first = 0; first < layout_.numel; first += part_) {  // each by its server
      for (const auto& [begin, end] : layout_.parameters) {
        const int64_t from = std::max(begin, first);
        const int64_t to = std::min(end, first + part_);
        if (from >= to) continue;
        const float scale = root_mean_square(&sum[from], to - from);
        for (int64_t i = from; i < to; ++i) {
          result[i] = signed_scale(sum[i], scale);
          server_error_[i] = sum[i] - result[i];
        }
      }
    }
    return result;
  }

  void forget() {
    for (Values& error : worker_error_) std::fill(error.begin(), error.end(), 0.0F);
    std::fill(server_error_.begin(), server_error_.end(), 0.0F);
  }

  // What was sent and has not arrived, as a mean over ranks.
  double remembered(int64_t i) const {
    double sum = server_error_[i];
    for (const Values& error : worker_error_) sum += static_cast<double>(error[i]) / world_;
    return sum;
  }

 private:
  Layout layout_;
  int world_;
  int64_t part_;
  std::vector<Values> worker_error_;
  Values server_error_;
};

struct Settings {
  float lr = 0.02F;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  int64_t freeze_step = 30;
  bool bias_correction = true;
};

inline float moved(float average, float gradient, double beta) {
  return average * static_cast<float>(beta) + gradient * static_cast<float>(1 - beta);
}

// m after the exchange of what all ranks made of it; 0 where there is no variance.
inline void exchange_average(Values& average, const Values& variance, const std::vector<Values>& gradients,
                             double beta1, Exchange& exchange) {
  std::vector<Values> own(gradients.size(), average);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    for (size_t i = 0; i < average.size(); ++i) own[rank][i] = moved(average[i], gradients[rank][i], beta1);
  }
  average = exchange.mean(own);
  for (size_t i = 0; i < average.size(); ++i) {
    if (variance[i] == 0) average[i] = 0;
  }
}

inline float denominator(float variance, double correction, double eps) {
  return std::sqrt(variance) / static_cast<float>(std::sqrt(correction)) + static_cast<float>(eps);
}

// One step of 1-bit Adam after the freeze.
inline void frozen_adam(Values& weights, Values& average, const Values& variance, const std::vector<Values>& gradients,
                        int64_t step, const Settings& s, Exchange& exchange) {
  exchange_average(average, variance, gradients, s.beta1, exchange);
  const auto count = static_cast<double>(step);
  const double lr = s.lr;
  const double correction1 = s.bias_correction ? 1 - std::pow(s.beta1, count) : 1.0;
  const double correction2 = s.bias_correction ? 1 - std::pow(s.beta2, static_cast<double>(s.freeze_step)) : 1.0;
  const auto rate = static_cast<float>(lr / correction1);
  const auto keep = static_cast<float>(1 - lr * s.weight_decay);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = weights[i] * keep - average[i] / denominator(variance[i], correction2, s.eps) * rate;
  }
}

struct LambSettings : Settings {
  double factor_max = 4.0;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
};

// One step of 1-bit LAMB after the freeze. `coefficient` and `factor`: by parameter.
inline void frozen_lamb(const Layout& layout, Values& weights, Values& average, const Values& variance, Values& fresh,
                        const std::vector<double>& coefficient, std::vector<double>& factor,
                        const std::vector<Values>& gradients, int64_t step, const LambSettings& s, Exchange& exchange) {
  const Values before = average;
  exchange_average(average, variance, gradients, s.beta1, exchange);
  double step_size = s.lr;
  if (s.bias_correction) {
    step_size *= std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.freeze_step))) /
                 (1 - std::pow(s.beta1, static_cast<double>(step)));
  }
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    const auto [begin, end] = layout.parameters[p];
    double largest = 0;
    double direction_squares = 0;
    double update_squares = 0;
    Values update(static_cast<size_t>(end - begin));
    for (int64_t i = begin; i < end; ++i) {
      const float gradient = (average[i] - before[i] * static_cast<float>(s.beta1)) / static_cast<float>(1 - s.beta1);
      fresh[i] = fresh[i] * static_cast<float>(s.beta2) + gradient * gradient * static_cast<float>(1 - s.beta2);
      const float divisor = std::sqrt(variance[i]) + static_cast<float>(s.eps);
      largest = std::max(largest, static_cast<double>(divisor / (std::sqrt(fresh[i]) + static_cast<float>(s.eps))));
      const float direction = average[i] / divisor;
      const float whole = direction + weights[i] * static_cast<float>(s.weight_decay);
      direction_squares += static_cast<double>(direction) * direction;
      update_squares += static_cast<double>(whole) * whole;
      update[static_cast<size_t>(i - begin)] = whole;
    }
    if (s.weight_decay != 0) {
      const double share = std::min(1.0, std::sqrt(direction_squares / update_squares));
      largest = largest * share + (1 - share);
    }
    double now = std::clamp(largest, s.factor_min, s.factor_max);
    now = std::min(now, factor[p] * (1 + s.factor_threshold));
    now = std::max(now, factor[p] * (1 - s.factor_threshold));
    factor[p] = now;
    const double trust = (coefficient[p] == 0 ? 1.0 : coefficient[p]) * now;
    for (int64_t i = begin; i < end; ++i) {
      weights[i] -= update[static_cast<size_t>(i - begin)] * static_cast<float>(trust * step_size);
    }
  }
}

// 0/1 Adam, all of it. The model's weights of a rank are base + stepped[rank].
class ZeroOneAdam {
 public:
  struct Policy {
    int64_t var_freeze_step = 40;
    int64_t var_update_scaler = 4;
    int64_t local_step_scaler = 16;
    int64_t local_step_clipper = 4;
  };

  ZeroOneAdam(const Layout& layout, int world, Values weights, Settings settings, Policy policy)
      : base(std::move(weights)),
        stepped(static_cast<size_t>(world), Values(base.size(), 0.0F)),
        settings_(settings),
        policy_(policy),
        world_(world),
        exchange_(layout, world),
        average_(static_cast<size_t>(world), Values(base.size(), 0.0F)),
        variance_(base.size(), 0.0F) {}

  bool next_is_dense() const { return step_ + 1 <= policy_.var_freeze_step && (step_ + 1) % variance_interval_ == 0; }
  // The gradient of each rank. clip_norm: of the mean, where that is what is used; 0: as it is.
  void step(const std::vector<Values>& gradients, double clip_norm) {
    clip_norm_ = clip_norm;
    ++step_;
    if (step_ > policy_.var_freeze_step) {
      step_alone(gradients);
    } else {
      step_together(gradients);
    }
  }

  Values base;
  std::vector<Values> stepped;

 private:
  void step_together(const std::vector<Values>& gradients) {
    Values mean(base.size(), 0.0F);
    if (step_ % variance_interval_ == 0) {
      for (size_t i = 0; i < base.size(); ++i) {
        float sum = gradients[0][i];
        for (int rank = 1; rank < world_; ++rank) sum += gradients[static_cast<size_t>(rank)][i];
        mean[i] = sum / static_cast<float>(world_);
      }
      clip(mean);
      for (size_t i = 0; i < base.size(); ++i) {
        variance_[i] = moved(variance_[i], mean[i] * mean[i], settings_.beta2);
      }
      ++variance_updates_;
      if (++variance_counter_ == policy_.var_update_scaler) {
        variance_counter_ = 0;
        variance_interval_ *= 2;
      }
    } else {
      mean = exchange_.mean(gradients);
      for (size_t i = 0; i < base.size(); ++i) {
        if (variance_[i] == 0) mean[i] = 0;
      }
    }
    const float rate = rate_now();
    const auto keep = static_cast<float>(1 - settings_.lr * settings_.weight_decay);
    for (size_t i = 0; i < base.size(); ++i) {
      average_[0][i] = moved(average_[0][i], mean[i], settings_.beta1);
      base[i] = base[i] * keep - average_[0][i] / denominator_of(i) * rate;
    }
    for (Values& average : average_) average = average_[0];
  }

  void clip(Values& mean) const {
    if (clip_norm_ <= 0) return;
    double squares = 0;
    for (const float value : mean) squares += static_cast<double>(value) * value;
    const double factor = std::min(1.0, clip_norm_ / (static_cast<float>(std::sqrt(squares)) + 1e-6));
    if (factor == 1.0) return;
    for (float& value : mean) value *= static_cast<float>(factor);
  }

  void step_alone(const std::vector<Values>& gradients) {
    if (step_ == policy_.var_freeze_step + 1) exchange_.forget();
    rates_ += exact_rate_now();
    const float rate = rate_now();
    const auto keep = static_cast<float>(1 - settings_.lr * settings_.weight_decay);
    for (int r = 0; r < world_; ++r) {
      const auto rank = static_cast<size_t>(r);
      for (size_t i = 0; i < base.size(); ++i) {
        average_[rank][i] = moved(average_[rank][i], gradients[rank][i], settings_.beta1);
        if (variance_[i] != 0) stepped[rank][i] -= average_[rank][i] / denominator_of(i) * rate;
      }
    }
    for (float& weight : base) weight *= keep;
    if (step_ % local_interval_ == 0) meet();
    if (++local_counter_ == policy_.local_step_scaler) {
      local_counter_ = 0;
      local_interval_ = std::min(policy_.local_step_clipper, local_interval_ * 2);
    }
  }

  void meet() {
    for (Values& own : stepped) {
      for (size_t i = 0; i < base.size(); ++i) own[i] *= denominator_of(i);
    }
    Values agreed = exchange_.mean(stepped);
    for (size_t i = 0; i < base.size(); ++i) {
      if (variance_[i] == 0) agreed[i] = 0;
      base[i] += agreed[i] / denominator_of(i);
      for (Values& average : average_) average[i] = agreed[i] / static_cast<float>(-rates_);
    }
    for (Values& own : stepped) std::fill(own.begin(), own.end(), 0.0F);
    rates_ = 0;
  }

  double exact_rate_now() const {
    const double correction =
        settings_.bias_correction ? 1 - std::pow(settings_.beta1, static_cast<double>(step_)) : 1.0;
    return static_cast<double>(settings_.lr) / correction;
  }
  float rate_now() const { return static_cast<float>(exact_rate_now()); }
  float denominator_of(size_t i) const {
    const double correction =
        settings_.bias_correction ? 1 - std::pow(settings_.beta2, static_cast<double>(variance_updates_)) : 1.0;
    return denominator(variance_[i], correction, settings_.eps);
  }

  Settings settings_;
  Policy policy_;
  int world_;
  Exchange exchange_;
  std::vector<Values> average_;
  Values variance_;
  double rates_ = 0;
  double clip_norm_ = 0;
  int64_t step_ = 0;
  int64_t variance_interval_ = 1;
  int64_t variance_counter_ = 0;
  int64_t variance_updates_ = 0;
  int64_t local_interval_ = 1;
  int64_t local_counter_ = 0;
};

}  // namespace ds::compression::reference
