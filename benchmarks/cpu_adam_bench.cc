// AdamW on the CPU beside the speed of this machine's memory.
//
//   cpu_adam_bench [--parameters 40000000] [--threads 1] [--rounds 9] [--only ours|torch] [--json]
//
// A virtual machine's bandwidth drifts within seconds, so every measured step stands between two passes of a stream of
// the same bytes with next to no arithmetic, in this process, on the same threads, over arrays of its own: `paired` is
// the mean time of the two neighbours over the step's, median of the rounds (in brackets the 10th and 90th percentile).
// 1 = as fast as the memory allows. "update" is AdamW on float32 masters with float32 gradients (28 bytes a parameter:
// master, two moments and gradient read, the first three written). "step" is all of an optimizer step from scaled
// gradients of 16 bits: norm and overflow check, unscaling and clipping, the update, the new weights in 16 bits; its
// stream reads the gradient for the norm (2 bytes), then 2 + 12 bytes, and writes 12 + 2. "torch" does both with
// LibTorch's kernels, as GradScaler, clip_grad_norm_ and fused AdamW do: a pass for each.
//
// Both kinds are checked against each other before they are timed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/memory_stream.h"
#include "benchmarks/paired_timing.h"
#include "core/check.h"
#include "core/host_threads.h"
#include "optim/optimizer_factory.h"
#include "zero/square_sum.h"

namespace {

using ds::benchmarks::paired_times;
using ds::benchmarks::PairedTimes;
using ds::benchmarks::quantile;
using ds::benchmarks::seconds;

constexpr double kLossScale = 1024.0;
constexpr double kClip = 1.0;
constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kWeightDecay = 0.01;

DS_STREAM_CLONES void adam_shape(float* __restrict p, float* __restrict m, float* __restrict v,
                                 const float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = 0.5F * p[i] + g[i];
    m[i] = 0.5F * m[i] + g[i];
    v[i] = 0.5F * v[i] + g[i];
  }
}

DS_STREAM_CLONES uint64_t read_only(const uint64_t* words, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

DS_STREAM_CLONES void step_shape(float* __restrict p, float* __restrict m, float* __restrict v,
                                 const uint16_t* __restrict g, uint16_t* __restrict copy, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(g[i]);
    p[i] = 0.5F * p[i] + value;
    m[i] = 0.5F * m[i] + value;
    v[i] = 0.5F * v[i] + value;
    copy[i] = g[i];
  }
}

// The streams, over arrays of their own, on LibTorch's threads.
class Streams {
 public:
  explicit Streams(int64_t numel)
      : p_(at::rand({numel})),
        m_(at::rand({numel})),
        v_(at::rand({numel})),
        g_(at::rand({numel})),
        g16_(g_.to(at::kBFloat16)),
        copy_(at::zeros_like(g16_)) {}

  void run_triad() {
    on_threads([&](int64_t begin, int64_t count) {
      ds::benchmarks::triad(at(p_, begin), at(m_, begin), at(v_, begin), count);
    });
  }
  void run_update() {
    on_threads([&](int64_t begin, int64_t count) {
      adam_shape(at(p_, begin), at(m_, begin), at(v_, begin), at(g_, begin), count);
    });
  }
  void run_step() {
    on_threads([&](int64_t begin, int64_t count) {
      sink_ = read_only(reinterpret_cast<const uint64_t*>(at16(g16_, begin)), count / 4);
    });
    on_threads([&](int64_t begin, int64_t count) {
      step_shape(at(p_, begin), at(m_, begin), at(v_, begin), at16(g16_, begin), at16(copy_, begin), count);
    });
  }

 private:
  static float* at(const at::Tensor& tensor, int64_t begin) { return tensor.data_ptr<float>() + begin; }
  static uint16_t* at16(const at::Tensor& tensor, int64_t begin) {
    return static_cast<uint16_t*>(tensor.data_ptr()) + begin;
  }
  void on_threads(const std::function<void(int64_t begin, int64_t count)>& body) {
    ds::for_each_range(p_, 1024, 1 << 15, [&](int64_t begin, int64_t end) { body(begin, end - begin); });
  }

  at::Tensor p_, m_, v_, g_, g16_, copy_;
  std::atomic<uint64_t> sink_{0};
};

class Alone : public ds::optimizers::SliceExchange {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void sum(const at::Tensor& /*values*/) override {}
  at::Tensor all_gather(const at::Tensor& slice) override { return slice; }
};

// The factor of the gradients: unscaled, and clipped to a norm of kClip.
double factor_of(double sum_of_scaled_squares) {
  ds::require<ds::InternalError>(std::isfinite(sum_of_scaled_squares), "the gradients overflow");
  const double norm = std::sqrt(sum_of_scaled_squares) / kLossScale;
  return std::min(1.0, kClip / (norm + 1e-6)) / kLossScale;
}

// This library's optimizer.
class Ours {
 public:
  explicit Ours(const at::Tensor& weights)
      : optimizer_(ds::optimizers::make_optimizer(
            {.type = "AdamW",
             .groups = {{.lr = kLr, .weight_decay = kWeightDecay, .beta1 = kBeta1, .beta2 = kBeta2, .eps = kEps}}})) {
    optimizer_->add_slice({.master = weights, .exchange = std::make_shared<Alone>()});
  }
  void update(const at::Tensor& gradient) {
    optimizer_->begin_step();
    optimizer_->update(0, gradient, 1.0);
  }
  void step(const at::Tensor& gradient, const at::Tensor& copy) {
    optimizer_->begin_step();
    optimizer_->update_into(0, gradient, factor_of(ds::zero::sum_of_squares(gradient)), copy);
  }
  const at::Tensor& weights() const { return optimizer_->slice(0).master; }

 private:
  std::unique_ptr<ds::optimizers::SliceOptimizer> optimizer_;
};

// LibTorch's kernels, a pass for each thing to do.
class Torch {
 public:
  explicit Torch(const at::Tensor& weights)
      : weights_(weights), exp_avg_(at::zeros_like(weights)), exp_avg_sq_(at::zeros_like(weights)) {}
  void update(const at::Tensor& gradient) {
    steps_.add_(1);
    at::_fused_adamw_(weights_, gradient, exp_avg_, exp_avg_sq_, at::TensorList(), steps_, kLr, kBeta1, kBeta2,
                      kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
  }
  void step(const at::Tensor& gradient, const at::Tensor& copy) {
    if (!wide_.defined()) wide_ = at::empty_like(weights_);
    wide_.copy_(gradient);
    wide_.mul_(1.0 / kLossScale);
    const double norm = at::linalg_vector_norm(wide_).item<double>();
    ds::require<ds::InternalError>(std::isfinite(norm), "the gradients overflow");
    wide_.mul_(std::min(1.0, kClip / (norm + 1e-6)));
    update(wide_);
    at::Tensor(copy).copy_(weights_);
  }
  const at::Tensor& weights() const { return weights_; }

 private:
  at::Tensor weights_, exp_avg_, exp_avg_sq_, wide_;
  at::Tensor steps_ = at::zeros({}, at::kFloat);
};

// Checks that both give the same results, before they are timed.
void check_results() {
  at::manual_seed(1);
  const at::Tensor start = at::randn({100003});
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    Ours ours(start.clone());
    Torch torch(start.clone());
    at::Tensor ours_copy = at::empty({100003}, type);
    at::Tensor torch_copy = at::empty({100003}, type);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient = (at::randn({100003}) * 0.01 * kLossScale).to(type);
      ours.step(gradient, ours_copy);
      torch.step(gradient, torch_copy);
    }
    const double error = (ours.weights() - torch.weights()).abs().max().item<double>();
    ds::require<ds::InternalError>(error < 2e-6, "expected LibTorch's weights, found a difference of ", error);
    ds::require<ds::InternalError>(at::equal(ours_copy, ours.weights().to(type)), "expected the weights in the copy");
  }
}

struct Settings {
  int64_t parameters = 40000000;
  int threads = 1;
  int64_t rounds = 9;
  std::string only;
  bool json = false;
};

class Bench {
 public:
  explicit Bench(const Settings& settings) : settings_(settings), streams_(settings.parameters) {}

  void run() {
    triad_gb_s_ = rate(12, [&] { streams_.run_triad(); });
    if (!settings_.json) {
      std::printf("%ld parameters, %d threads; triad %.1f GB/s\n%-18s %10s %8s %12s  %s\n", settings_.parameters,
                  settings_.threads, triad_gb_s_, "", "ns/param", "GB/s", "stream GB/s", "paired");
    }
    at::manual_seed(2);
    const at::Tensor gradient = at::randn({settings_.parameters}) * 0.01;
    run_update<Ours>("ours update", gradient);
    run_update<Torch>("torch update", gradient);
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
      const at::Tensor scaled = (gradient * kLossScale).to(type);
      const std::string name = type == at::kBFloat16 ? " step bf16" : " step fp16";
      run_step<Ours>("ours" + name, scaled);
      run_step<Torch>("torch" + name, scaled);
    }
    if (settings_.json) {
      std::cout << nlohmann::json{{"parameters", settings_.parameters},
                                  {"threads", settings_.threads},
                                  {"triad_gb_s", triad_gb_s_},
                                  {"cases", cases_}}
                << '\n';
    }
  }

 private:
  template <class Kind>
  void run_update(const std::string& name, const at::Tensor& gradient) {
    if (!name.starts_with(settings_.only)) return;
    Kind kind(at::randn({settings_.parameters}));
    measure(
        name, 28, [&] { kind.update(gradient); }, [&] { streams_.run_update(); });
  }
  template <class Kind>
  void run_step(const std::string& name, const at::Tensor& gradient) {
    if (!name.starts_with(settings_.only)) return;
    Kind kind(at::randn({settings_.parameters}));
    const at::Tensor copy = at::zeros({settings_.parameters}, gradient.scalar_type());
    measure(
        name, 30, [&] { kind.step(gradient, copy); }, [&] { streams_.run_step(); });
  }

  double gb_s(double bytes, double time) const {
    return bytes * static_cast<double>(settings_.parameters) / time / 1e9;
  }
  double rate(double bytes, const std::function<void()>& body) const {
    std::vector<double> times;
    for (int64_t round = 0; round <= settings_.rounds; ++round) times.push_back(seconds(body));
    return gb_s(bytes, quantile(times, 0.5));
  }

  void measure(const std::string& name, double bytes, const std::function<void()>& body,
               const std::function<void()>& stream) {
    const PairedTimes times = paired_times(settings_.rounds, body, stream);
    const double time = quantile(times.body, 0.5);
    const double ns = time / static_cast<double>(settings_.parameters) * 1e9;
    if (!settings_.json) {
      std::printf("%-18s %10.3f %8.1f %12.1f  %.3f [%.3f %.3f]\n", name.c_str(), ns, gb_s(bytes, time),
                  gb_s(bytes, quantile(times.stream, 0.5)), quantile(times.paired, 0.5), quantile(times.paired, 0.1),
                  quantile(times.paired, 0.9));
      std::fflush(stdout);
    }
    cases_[name] = {{"ns_per_parameter", ns}, {"gb_s", gb_s(bytes, time)}, {"paired", times.paired}};
  }

  Settings settings_;
  Streams streams_;
  double triad_gb_s_ = 0;
  nlohmann::json cases_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("AdamW on the CPU beside the speed of this machine's memory");
  Settings settings;
  app.add_option("--parameters", settings.parameters)->check(CLI::Range(int64_t{1} << 20, int64_t{1} << 31));
  app.add_option("--threads", settings.threads)->check(CLI::PositiveNumber);
  app.add_option("--rounds", settings.rounds, "measured steps of each kind")->check(CLI::PositiveNumber);
  app.add_option("--only", settings.only)->check(CLI::IsMember({"ours", "torch"}));
  app.add_flag("--json", settings.json, "print one JSON object instead of the table");
  CLI11_PARSE(app, argc, argv);
  try {
    const at::NoGradGuard no_grad;
    at::set_num_threads(settings.threads);
    check_results();
    Bench(settings).run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "cpu_adam_bench: " << error.what() << '\n';
    return 1;
  }
}
