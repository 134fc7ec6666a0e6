// 0/1 Adam once more, for all ranks in one place: loops over plain arrays, from the formulas of the paper.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/compression/frozen_reference.h"

namespace ds::compression::reference {

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
