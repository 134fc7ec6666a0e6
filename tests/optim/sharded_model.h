// Six small parameters with fixed weights and gradients (those of optimizers_reference.py), cut into slices.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "optim/optimizer_factory.h"

namespace ds::optimizers {

inline const std::vector<ParameterInfo>& model_parameters() {
  static const std::vector<ParameterInfo> parameters = {
      {"h.weight", {6, 10}, 60},      {"tall.weight", {10, 4}, 40},  {"h.bias", {7}, 7},
      {"conv.weight", {3, 5, 2}, 30}, {"square.weight", {5, 5}, 25}, {"embed.weight", {9, 4}, 36},
  };
  return parameters;
}

// `numel` values in [-1, 1): the top 24 bits of splitmix64.
inline at::Tensor uniform(uint64_t stream, int64_t numel) {
  at::Tensor values = at::empty({numel}, at::kFloat);
  uint64_t state = stream * 0x632BE59BD9B4E019ULL;
  for (int64_t i = 0; i < numel; ++i) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    values.data_ptr<float>()[i] = static_cast<float>(z >> 40) / static_cast<float>(1 << 23) - 1.0F;
  }
  return values;
}

inline at::Tensor initial_weight(int64_t parameter) {
  return uniform(static_cast<uint64_t>(parameter) + 1, model_parameters()[static_cast<size_t>(parameter)].numel);
}

inline at::Tensor gradient_of(int64_t step, int64_t parameter) {
  return uniform(static_cast<uint64_t>(1000 * step + parameter),
                 model_parameters()[static_cast<size_t>(parameter)].numel) *
         0.5;
}

class Alone : public SliceExchange {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void sum(const at::Tensor& /*values*/) override {}
  at::Tensor all_gather(const at::Tensor& slice) override { return slice; }
};

// Parameters of one group, joined and cut into `world` slices; the last one is padded.
struct Bucket {
  std::vector<Segment> segments;
  int64_t slice_numel = 0;

  Bucket(const std::vector<int64_t>& parameters, int world) {
    int64_t offset = 0;
    for (const int64_t p : parameters) {
      const int64_t numel = model_parameters()[static_cast<size_t>(p)].numel;
      segments.push_back({p, 0, offset, numel});
      offset += numel;
    }
    slice_numel = (offset + world - 1) / world;
  }

  std::vector<Segment> slice_segments(int rank) const {
    const int64_t begin = rank * slice_numel;
    std::vector<Segment> result;
    for (const Segment& whole : segments) {
      const int64_t from = std::max(begin, whole.slice_offset);
      const int64_t to = std::min(begin + slice_numel, whole.slice_offset + whole.length);
      if (from < to) result.push_back({whole.parameter, from - whole.slice_offset, from - begin, to - from});
    }
    return result;
  }
};

// One rank's optimizer over the model: a bucket per group, bucket b in group b.
class ShardedModel {
 public:
  ShardedModel(const OptimizerOptions& options, const std::vector<std::vector<int64_t>>& buckets,
               const std::shared_ptr<SliceExchange>& exchange, at::ScalarType master_type = at::kFloat)
      : exchange_(exchange), optimizer_(make_optimizer(options)) {
    for (size_t b = 0; b < buckets.size(); ++b) {
      buckets_.emplace_back(buckets[b], exchange->size());
      Slice slice;
      slice.segments = buckets_[b].slice_segments(exchange->rank());
      slice.master = flat(b, initial_weight).to(master_type);
      slice.group = static_cast<int>(b);
      slice.bucket_offset = exchange->rank() * buckets_[b].slice_numel;
      slice.bucket_segments = buckets_[b].segments;
      slice.parameters = &model_parameters();
      slice.exchange = exchange;
      optimizer_->add_slice(std::move(slice));
    }
  }

  SliceOptimizer& optimizer() { return *optimizer_; }

  // Steps `from`, ..., `to` - 1, with gradients cast to `type` and multiplied by 1 / scale beforehand.
  void run(int64_t from, int64_t to, at::ScalarType type = at::kFloat, double scale = 1.0) {
    for (int64_t step = from; step < to; ++step) {
      optimizer_->begin_step();
      for (size_t b = 0; b < buckets_.size(); ++b) {
        const at::Tensor gradient = flat(b, [&](int64_t p) { return gradient_of(step, p) / scale; }).to(type);
        optimizer_->update(static_cast<int64_t>(b), gradient, scale);
      }
    }
  }

  // This rank's weights at their place in the model, all parameters in order; zeros elsewhere.
  at::Tensor weights() {
    at::Tensor all = at::zeros({198}, at::kFloat);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const Slice& slice = optimizer_->slice(static_cast<int64_t>(b));
      for (const Segment& s : slice.segments) {
        int64_t begin = s.parameter_offset;
        for (int64_t p = 0; p < s.parameter; ++p) begin += model_parameters()[static_cast<size_t>(p)].numel;
        all.narrow(0, begin, s.length).copy_(slice.master.narrow(0, s.slice_offset, s.length));
      }
    }
    return all;
  }

 private:
  template <class Values>
  at::Tensor flat(size_t bucket, const Values& values) const {
    at::Tensor result = at::zeros({buckets_[bucket].slice_numel}, at::kFloat);
    for (const Segment& s : buckets_[bucket].slice_segments(exchange_->rank())) {
      result.narrow(0, s.slice_offset, s.length).copy_(values(s.parameter).narrow(0, s.parameter_offset, s.length));
    }
    return result;
  }

  std::shared_ptr<SliceExchange> exchange_;
  std::unique_ptr<SliceOptimizer> optimizer_;
  std::vector<Bucket> buckets_;
};

// The model as the engine lays it out: one bucket, or for Muon one of matrices and one of the rest.
inline std::vector<std::vector<int64_t>> one_bucket() { return {{0, 1, 2, 3, 4, 5}}; }
inline std::vector<std::vector<int64_t>> muon_buckets() { return {{0, 1, 3, 4}, {2, 5}}; }

}  // namespace ds::optimizers
