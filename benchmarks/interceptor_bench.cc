// The cost of watching every operator, as stage 3 does, while all parameters are there: a training step of the
// example's GPT, plain and watched in turn, on one rank and one thread.
//
//   interceptor_bench [--layers 6] [--hidden 512] [--heads 8] [--seq_len 256] [--batch 4] [--pairs 60]
//
// A step is forward and backward; its time is the CPU time of the thread, so that other programs count little. A pair
// is one step of each kind, the first by turns; printed are medians of both kinds, their ratio, and between which
// quartiles the ratios of the pairs lie (the noise). Two models are measured: the one asked for, and one of nearly the
// same operators on tiny tensors, where their number decides: it gives the price of one operator, and with it the cost
// for the first model free from the noise of its kernels. Checked: the same loss in every step, to the bit, and reads
// of every bucket.
//
// Under a profiler: --only plain and --only watched run --pairs steps of one kind on the model asked for. Instructions
// per operator are the difference of both runs, over the operators that they print:
//   valgrind --tool=callgrind interceptor_bench --hidden 16 --seq_len 8 --batch 1 --only watched
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "benchmarks/paired_timing.h"
#include "core/check.h"
#include "core/op_interceptor.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "zero/parameter_bucket.h"
#include "zero/partition.h"

namespace {

using ds::OpInterceptor;
using ds::benchmarks::quantile;
using ds::benchmarks::thread_seconds;
using ds::zero::ParameterBucket;

struct Size {
  gpt::GptConfig model = {.layers = 6, .hidden = 512, .heads = 8, .seq_len = 256};
  int64_t batch = 4;
};

// Counts every operator of a thread, composite ones and those that they call.
class OperatorCount {
 public:
  OperatorCount()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&OperatorCount::on_operator).scopes({at::RecordScope::FUNCTION}))) {
    count_ = 0;
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;
  int64_t count() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction&) {
    ++count_;
    return nullptr;
  }
  static thread_local int64_t count_;
  at::CallbackHandle handle_;
};
thread_local int64_t OperatorCount::count_ = 0;

// Does what zero/gather/parameter_gatherer.cc does before an operator reads a tensor, for buckets that are whole.
class Watcher {
 public:
  explicit Watcher(const std::vector<ParameterBucket>& buckets)
      : interceptor([this](const at::Tensor& tensor) { before_read(tensor); }),
        entries_(buckets.size()),
        current_(buckets.size()) {
    for (size_t b = 0; b < buckets.size(); ++b) {
      bucket_of_storage_.emplace(buckets[b].flat().storage().unsafeGetStorageImpl(), b);
    }
  }
  bool saw_every_bucket() const {
    return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.last_use > 0; });
  }

  int64_t tensors = 0;
  int64_t of_parameters = 0;
  int64_t changes = 0;
  OpInterceptor interceptor;

 private:
  struct Entry {
    uint64_t used_by = 0;
    uint64_t last_use = 0;
  };

  void before_read(const at::Tensor& tensor) {
    ++tensors;
    const auto found = bucket_of_storage_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == bucket_of_storage_.end()) return;
    ++of_parameters;
    Entry& entry = entries_[found->second];
    entry.used_by = OpInterceptor::outermost_operator();
    changes += OpInterceptor::changes_tensor();
    if (found->second == current_) return;
    current_ = found->second;
    entry.last_use = ++uses_;
  }

  std::unordered_map<const void*, size_t> bucket_of_storage_;
  std::vector<Entry> entries_;
  size_t current_;
  uint64_t uses_ = 0;
};

// The parameters become views of flat buckets, as in the engine.
std::vector<ParameterBucket> into_buckets(const gpt::Gpt& model) {
  std::vector<ds::zero::Parameter> parameters;
  std::vector<ds::zero::LayoutParameter> shapes;
  for (const auto& item : model.named_parameters()) {
    parameters.push_back({item.key(), item.value()});
    shapes.push_back({item.key(), item.value().numel()});
  }
  std::vector<ParameterBucket> buckets;
  for (ds::zero::BucketLayout& layout : ds::zero::lay_out(shapes, {})) {
    const at::Tensor values = ds::zero::flatten(layout, parameters, at::kFloat);
    buckets.emplace_back(std::move(layout), parameters, values, at::kFloat);
  }
  return buckets;
}

// Per step.
struct Counts {
  int64_t operators = 0;
  int64_t outermost = 0;
  int64_t tensors = 0;
  int64_t of_parameters = 0;
};

// Seconds a step: medians.
struct Timing {
  double plain = 0;
  double watched = 0;
  double low = 0, high = 0;  // quartiles of watched / plain in the pairs
};

class Job {
 public:
  explicit Job(const Size& size) : model_(size.model) {
    gpt::initialize_weights(model_, 1);
    buckets_ = into_buckets(model_);
    watcher_ = std::make_unique<Watcher>(buckets_);
    tokens_ = at::arange(size.batch * size.model.seq_len, at::kLong).mul(31).remainder(size.model.vocab);
    tokens_ = tokens_.view({size.batch, size.model.seq_len});
    run(/*watched=*/false);
    run(/*watched=*/true);
    ds::require<ds::InternalError>(watcher_->saw_every_bucket(), "expected reads of every bucket, found none of some");
    ds::require<ds::InternalError>(watcher_->changes == 0, "expected that no operator changes a parameter, found ",
                                   watcher_->changes);
  }

  // Seconds of one step.
  double run(bool watched) {
    if (watched) watcher_->interceptor.enable();
    const double start = thread_seconds();
    const at::Tensor loss = model_.forward(tokens_, tokens_);
    loss.backward();
    const double seconds = thread_seconds() - start;
    watcher_->interceptor.disable();
    if (!loss_.defined()) loss_ = loss.detach();
    ds::require<ds::InternalError>(loss.equal(loss_), "expected the loss ", loss_.item<float>(),
                                   " of the first step in every step, found ", loss.item<float>());
    return seconds;
  }

  Counts count() {
    watcher_->tensors = watcher_->of_parameters = 0;
    watcher_->interceptor.enable();
    const auto before = static_cast<int64_t>(OpInterceptor::outermost_operator());
    const OperatorCount operators;
    model_.forward(tokens_, tokens_).backward();
    const auto after = static_cast<int64_t>(OpInterceptor::outermost_operator());
    watcher_->interceptor.disable();
    return {operators.count(), after - before, watcher_->tensors, watcher_->of_parameters};
  }

  Timing measure(int64_t pairs) {
    std::vector<double> plain;
    std::vector<double> watched;
    std::vector<double> ratio;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const bool plain_first = pair % 2 == 0;
      const double first = run(!plain_first);
      const double second = run(plain_first);
      plain.push_back(plain_first ? first : second);
      watched.push_back(plain_first ? second : first);
      ratio.push_back(watched.back() / plain.back());
    }
    return {quantile(plain, 0.5), quantile(watched, 0.5), quantile(ratio, 0.25), quantile(ratio, 0.75)};
  }

  int64_t parameters() const { return gpt::parameter_count(model_.config()); }
  size_t buckets() const { return buckets_.size(); }

 private:
  gpt::Gpt model_;
  std::vector<ParameterBucket> buckets_;
  std::unique_ptr<Watcher> watcher_;
  at::Tensor tokens_;
  at::Tensor loss_;
};

void print(const char* name, Job& job, const Counts& counts, const Timing& time) {
  std::printf("%-12s %10.2f %8zu %10ld %10ld %8ld %14ld %12.3f %12.3f %9.4f  %.3f..%.3f\n", name,
              static_cast<double>(job.parameters()) / 1e6, job.buckets(), counts.operators, counts.outermost,
              counts.tensors, counts.of_parameters, time.plain * 1e3, time.watched * 1e3, time.watched / time.plain,
              time.low, time.high);
  std::fflush(stdout);
}

void compare(const Size& size, int64_t pairs) {
  std::printf("GPT of %ld layers, hidden %ld, %ld heads, batch %ld x %ld; per step, medians of %ld pairs\n",
              size.model.layers, size.model.hidden, size.model.heads, size.batch, size.model.seq_len, pairs);
  std::printf("%-12s %10s %8s %10s %10s %8s %14s %12s %12s %9s  %s\n", "", "M params", "buckets", "operators",
              "outermost", "tensors", "of parameters", "plain, ms", "watched, ms", "ratio", "quartiles");
  Job job(size);
  const Counts counts = job.count();
  const Timing time = job.measure(pairs);
  print("this GPT", job, counts, time);

  Size tiny = size;
  tiny.model.hidden = 2 * size.model.heads;
  tiny.model.seq_len = std::min<int64_t>(size.model.seq_len, 8);
  tiny.batch = 1;
  Job tiny_job(tiny);
  const Counts tiny_counts = tiny_job.count();
  const Timing tiny_time = tiny_job.measure(pairs * 20);
  print("tiny tensors", tiny_job, tiny_counts, tiny_time);

  const double each = (tiny_time.watched - tiny_time.plain) / static_cast<double>(tiny_counts.operators);
  std::printf("watching: %.0f ns an operator on tiny tensors; as much for each of this GPT is %.3f %% of its step\n",
              each * 1e9, each * static_cast<double>(counts.operators) / time.plain * 100);
}

void run_only(const Size& size, bool watched, int64_t steps) {
  Job job(size);
  const Counts counts = job.count();
  for (int64_t step = 0; step < steps; ++step) job.run(watched);
  std::printf("%ld %s steps, %ld operators\n", steps, watched ? "watched" : "plain", steps * counts.operators);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What watching every operator costs a training step while all parameters are there");
  Size size;
  int64_t pairs = 60;
  std::string only;
  app.add_option("--layers", size.model.layers);
  app.add_option("--hidden", size.model.hidden);
  app.add_option("--heads", size.model.heads);
  app.add_option("--seq_len", size.model.seq_len);
  app.add_option("--batch", size.batch, "sequences a step")->check(CLI::PositiveNumber);
  app.add_option("--pairs", pairs, "steps of each kind")->check(CLI::PositiveNumber);
  app.add_option("--only", only, "run steps of one kind, for a profiler")->check(CLI::IsMember({"plain", "watched"}));
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(1);
    only.empty() ? compare(size, pairs) : run_only(size, only == "watched", pairs);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "interceptor_bench: " << error.what() << '\n';
    return 1;
  }
}
