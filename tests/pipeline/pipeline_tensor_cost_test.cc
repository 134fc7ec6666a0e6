// Pipelines with a tensor axis: the bytes that each rank sends along each axis, and the memory that it takes, against
// what is worked out beforehand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective_observer.h"
#include "core/text.h"
#include "profiling/comms_log.h"
#include "profiling/tensor_memory.h"
#include "tests/pipeline/split_job.h"
#include "tests/support/grid.h"
#include "zero/partition.h"

namespace ds::pipeline {
namespace {

// The bytes that a rank sends in each group, by the group's ranks and the label of the operation.
class SentBytes final : public comm::CollectiveObserver {
 public:
  using ByLabel = std::map<std::string, int64_t>;

  int add_group(const std::string& /*name*/, const std::vector<int>& ranks, int /*own*/) override {
    const std::lock_guard lock(mutex_);
    groups_.push_back(ranks);
    return static_cast<int>(groups_.size()) - 1;
  }
  comm::Work observe(int group, comm::Collective& collective, c10::function_ref<comm::Work()> launch) override {
    {
      const std::lock_guard lock(mutex_);
      const std::vector<int>& ranks = groups_.at(static_cast<size_t>(group));
      const auto n = static_cast<int64_t>(ranks.size());
      int64_t& sent = sent_[ranks][collective.label];
      const int64_t whole = profiling::whole_bytes(collective, ranks.size());
      if (collective.kind == comm::CollectiveKind::kSend) sent += whole;
      if (collective.kind == comm::CollectiveKind::kAllReduce) sent += 2 * whole * (n - 1) / n;
      if (collective.kind == comm::CollectiveKind::kAllGather ||
          collective.kind == comm::CollectiveKind::kReduceScatter) {
        sent += whole * (n - 1) / n;
      }
    }
    return launch();
  }
  void phase(const char* /*name*/, int64_t /*step*/, int64_t /*micro_step*/) override {}

  std::map<std::vector<int>, ByLabel> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(sent_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<int>> groups_;
  std::map<std::vector<int>, ByLabel> sent_;
};

// What a rank sends in a step: to the ranks of other stages, to those of its tensor axis, as sums of layers and as
// pieces of what stages send, and to those that train the same parameters.
struct AxisBytes {
  int64_t messages = 0, sums = 0, pieces = 0, data = 0;

  bool operator==(const AxisBytes&) const = default;
};

void PrintTo(const AxisBytes& bytes, std::ostream* out) {  // NOLINT: GoogleTest's name
  *out << "messages " << bytes.messages << ", sums " << bytes.sums << ", pieces " << bytes.pieces << ", data "
       << bytes.data;
}

bool begins_with_any(const std::string& text, const std::vector<std::string>& starts) {
  return std::any_of(starts.begin(), starts.end(), [&](const std::string& start) { return text.starts_with(start); });
}

// Leaves out what ranks compare and agree on, which has a label of its own: a few numbers.
AxisBytes by_axis(const SplitJob& job, const std::map<std::vector<int>, SentBytes::ByLabel>& sent) {
  AxisBytes result;
  for (const auto& [ranks, labels] : sent) {
    if (ranks.size() < 2) continue;
    const bool tensor = ranks[1] - ranks[0] == 1;
    const bool data = !tensor && ranks[1] - ranks[0] < job.tensor * job.data;
    for (const auto& [label, bytes] : labels) {
      const bool between_stages = begins_with_any(label, {"activation of stage", "gradient of stage"});
      if (between_stages) (tensor ? result.pieces : result.messages) += bytes;
      if (tensor && label.empty()) result.sums += bytes;
      if (data && label.find("bucket") != std::string::npos) result.data += bytes;
    }
  }
  return result;
}

// The elements that a rank has of its stage: parts of the table's, the column's and the row layer's weights and of the
// column layer's bias, and what is whole.
struct StageElements {
  int64_t table, column, row, bias, whole;
};

StageElements elements_of_stage(const SplitJob& job, int rank) {
  const int64_t vocabulary = (kVocabulary + (rank % job.tensor == 0 ? job.tensor - 1 : 0)) / job.tensor;
  const int64_t columns = 2 * kWidth / job.tensor;
  return {.table = vocabulary * kWidth,
          .column = columns * kWidth,
          .row = columns * kWidth,
          .bias = columns,
          .whole = 3 * kWidth};
}

bool is_last_stage(const SplitJob& job, int rank) { return rank >= job.world() - job.tensor * job.data; }

// Of a bucket: its slices are whole.
int64_t in_slices(const SplitJob& job, int64_t elements) {
  const int64_t unit = zero::kAlignment * (job.stage == 0 ? 1 : job.data);
  return (elements + unit - 1) / unit * unit;
}

// Returns the bytes that a rank sends of a bucket that all data-parallel ranks gather, or reduce to slices.
int64_t sent_of(const SplitJob& job, int64_t elements) { return elements * 4 * (job.data - 1) / job.data; }

int64_t expected_data_bytes(const SplitJob& job, int rank) {
  const auto [table, column, row, bias, whole] = elements_of_stage(job, rank);
  // Parts and what is whole have a bucket each; at stage 3 so has the bias, which stays full.
  const int64_t parts = job.stage == 3 ? in_slices(job, table + column + row) + in_slices(job, bias)
                                       : in_slices(job, table + column + row + bias);
  // Stages 2 and 3 reduce in every backward. What stage 3 has gathered stays until the update: it is used again soon.
  return sent_of(job, parts + in_slices(job, whole)) * (job.stage >= 2 ? kBatchesOfAStep + 1 : 2);
}

// Stages of a table, a column and a row layer each; between them x of [2, 8, kWidth].
AxisBytes expected_bytes(const SplitJob& job, int rank, bool in_pieces) {
  constexpr int64_t kRows = 2 * 8;
  constexpr int64_t kActivation = kRows * kWidth * 4;
  const bool last = is_last_stage(job, rank);
  const auto reduced = [&](int64_t bytes) { return 2 * bytes * (job.tensor - 1) / job.tensor; };
  AxisBytes bytes;
  bytes.messages = kBatchesOfAStep * kActivation / (in_pieces ? job.tensor : 1);
  bytes.pieces = in_pieces ? kBatchesOfAStep * kActivation * (job.tensor - 1) / job.tensor : 0;
  // The row layer's output, the gradient of the column layer's input, and the embedding's output or the gradient of the
  // head's input. The loss exchanges the greatest score, the sum and the target's score of each row.
  bytes.sums = kBatchesOfAStep * (3 * reduced(kActivation) + (last ? 3 * reduced(kRows * 4) : 0));
  bytes.data = expected_data_bytes(job, rank);
  return bytes;
}

// `expected`: of a rank in a step.
void expect_bytes(const SplitJob& job, const std::function<AxisBytes(int rank)>& expected) {
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto sent = std::make_shared<SentBytes>();
    world.observe_with(sent);
    const auto engine = job.start(world);
    int64_t next = 0;
    const auto step = [&] {
      engine->train_batch([&] { return text_of(next++, engine->communicator().rank()); });
      engine->synchronize_parameters();
    };
    step();  // agrees on shapes, and on the order in which stage 3 uses buckets
    sent->take();
    step();
    EXPECT_EQ(by_axis(job, sent->take()), expected(world.rank())) << "rank " << world.rank();
  });
}

TEST(PipelineTensorBytes, AreThoseOfTheFormulaOnEachAxis) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(cat("stage ", stage));
    SplitJob job{.data = 2, .stage = stage, .depth = 2};
    job.more["pipeline"] = {{"pipe_partitioned", true}, {"grad_partitioned", true}};
    expect_bytes(job, [&](int rank) { return expected_bytes(job, rank, /*in_pieces=*/true); });
  }
  const SplitJob alone{.depth = 2};
  expect_bytes(alone, [&](int rank) { return expected_bytes(alone, rank, /*in_pieces=*/false); });
}

// Where a bucket stays only if no other one is used before it, each layer's bucket is gathered for its forward and for
// its backward in every micro-batch. In gpipe all forwards come before all backwards. The backward of a table that is
// looked up reads nothing.
TEST(PipelineTensorBytes, AtStageThreeEachUseOfABucketIsAGather) {
  SplitJob job{.data = 2, .stage = 3, .schedule = "gpipe", .depth = 2};
  job.more["zero_optimization"] = {{"stage3_max_reuse_distance", 0}, {"reduce_bucket_size", 300}};
  expect_bytes(job, [&](int rank) {
    const auto [table, column, row, bias, whole] = elements_of_stage(job, rank);
    // The first stage: table, column, row in each forward, row, column in each backward, where what is used next stays.
    // The last one: column, row, head, and back.
    constexpr int64_t kBatches = kBatchesOfAStep;
    const bool last = is_last_stage(job, rank);
    const int64_t of_table = last ? 2 * kBatches - 1 : kBatches;
    const int64_t of_column = last ? 2 * kBatches : kBatches;
    const int64_t of_row = last ? 2 * kBatches - 1 : kBatches;
    const int64_t persistent = in_slices(job, bias) + in_slices(job, whole);
    const int64_t of_weights =
        of_table * in_slices(job, table) + of_column * in_slices(job, column) + of_row * in_slices(job, row);
    const int64_t reduced =
        kBatches * (in_slices(job, table) + in_slices(job, column) + in_slices(job, row) + persistent);
    AxisBytes bytes = expected_bytes(job, rank, /*in_pieces=*/false);
    bytes.data = sent_of(job, of_weights + persistent + reduced);
    return bytes;
  });
}

struct FilledLinearImpl : torch::nn::LinearImpl {
  FilledLinearImpl(int64_t inputs, int64_t outputs, const std::string& name) : LinearImpl(inputs, outputs) {
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& x) { return LinearImpl::forward(x.to(weight.scalar_type())); }
};
TORCH_MODULE(FilledLinear);

constexpr int64_t kColumns = 256;

// For two stages: a column and a row layer each.
std::vector<LayerSpec> large_layers() {
  std::vector<LayerSpec> layers;
  for (const std::string name : {"a", "b"}) {
    layers.push_back(LayerSpec::of<FilledLinear>(kColumns, 2 * kColumns, name + ".up").named(name + ".up"));
    layers.push_back(LayerSpec::of<FilledLinear>(2 * kColumns, kColumns, name + ".down").named(name + ".down"));
  }
  return layers;
}

void expect_predicted_memory(const SplitJob& job) {
  const auto loss = [](const at::Tensor& output, const at::Tensor& label) { return (output - label).square().mean(); };
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const profiling::TensorMemory memory;
    const auto engine =
        engine::initialize({.model = std::make_shared<PipelineModule>(large_layers(), PipelineOptions{.loss = loss}),
                            .config = job.config(),
                            .split = {{".*up", parallel::Style::kColumn}, {".*down", parallel::Style::kRow}},
                            .communicator = test::borrowed(world)})
            .engine;
    for (int step = 0; step < 3; ++step) {
      engine->train_batch([] {
        const at::Tensor input = torch::ones({1, kColumns});
        return MicroBatch{.inputs = {input}, .labels = {input}};
      });
    }
    engine->synchronize_parameters();
    const auto predicted = static_cast<double>(engine->plan().bytes->total());
    EXPECT_NEAR(static_cast<double>(memory.live_bytes()) / predicted, 1.0, 0.02) << "rank " << world.rank();
  });
}

TEST(PipelineTensorMemory, BetweenStepsARankHoldsWhatIsPredicted) {
  for (const auto& [stage, data] : test::grid_sample(1, std::vector{3, 0, 1, 2}, std::vector{2, 1})) {
    SCOPED_TRACE(cat("stage ", stage, ", data ", data));
    expect_predicted_memory({.data = data, .stage = stage});
  }
  SCOPED_TRACE("stage 2, data 2, bf16");
  expect_predicted_memory({.data = 2, .stage = 2, .more = {{"bf16", {{"enabled", true}}}}});
}

}  // namespace
}  // namespace ds::pipeline
