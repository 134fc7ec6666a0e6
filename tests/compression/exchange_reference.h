// The exchange of the compressed optimizers once more, for all ranks in one place: loops over plain arrays, from the
// formulas of the papers (and compression/*.h), without messages, buckets and kernels.
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

}  // namespace ds::compression::reference
