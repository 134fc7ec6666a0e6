// Loaders with workers: the same batches whatever their number, in structures of any kind, and what goes wrong.
#include "dsengine/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "dsengine/data_loader.h"

namespace ds::data {
namespace {

using engine::DataLoader;
using testing::AllOf;
using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;
using testing::ThrowsMessage;

// Sample i is i and a number that is drawn.
struct Drawing {
  struct Sample {
    at::Tensor index, noise;
    static constexpr auto fields() { return std::tuple(&Sample::index, &Sample::noise); }
  };
  Sample get(size_t index) const {
    if (index % 3 == 0) std::this_thread::yield();
    return {torch::tensor(static_cast<int64_t>(index)), torch::rand({4}, sample_generator())};
  }
  int64_t size() const { return count; }
  int64_t count = 23;
};

std::vector<int64_t> numbers_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous().view(-1);
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

template <class L>
std::vector<Drawing::Sample> batches_of(L& loader, int64_t most = 1000) {
  std::vector<Drawing::Sample> result;
  if (most == 0) return result;
  for (auto& batch : loader) {
    result.push_back(batch);
    if (--most == 0) break;
  }
  return result;
}

void expect_equal(const std::vector<Drawing::Sample>& a, const std::vector<Drawing::Sample>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::equal(a[i].index, b[i].index)) << "batch " << i;
    EXPECT_TRUE(torch::equal(a[i].noise, b[i].noise)) << "batch " << i;
  }
}

LoaderOptions options_with(int workers) {
  return {.batch_size = 3, .rank = 1, .world_size = 2, .reading = {.num_workers = workers}};
}

TEST(Loader, GivesTheSameBatchesForAnyNumberOfWorkers) {
  Loader reference(Drawing(), options_with(0));
  const auto first = batches_of(reference);
  const auto second = batches_of(reference);
  ASSERT_THAT(first, SizeIs(4));
  EXPECT_FALSE(torch::equal(first[0].noise, second[0].noise)) << "each epoch draws anew";
  for (const int workers : {1, 4}) {
    for (const bool persistent : {false, true}) {
      LoaderOptions options = options_with(workers);
      options.reading.persistent_workers = persistent;
      Loader loader(Drawing(), options);
      expect_equal(batches_of(loader), first);
      expect_equal(batches_of(loader), second);
      EXPECT_EQ(loader.epoch(), 2);
      loader.set_epoch(0);
      expect_equal(batches_of(loader), first);
    }
  }
}

TEST(Loader, GoesOnInTheMiddleOfAnEpochBitForBit) {
  Loader reference(Drawing(), options_with(0));
  const auto whole = batches_of(reference);
  for (const int workers : {0, 4}) {
    Loader loader(Drawing(), options_with(workers));
    batches_of(loader, 2);
    LoaderOptions other = options_with(4 - workers);
    other.seed = 99;
    Loader resumed(Drawing(), other);
    resumed.load_state_dict(nlohmann::json::parse(loader.state_dict().dump()));
    const std::vector<Drawing::Sample> rest(whole.begin() + 2, whole.end());
    expect_equal(batches_of(resumed), rest);
    expect_equal(batches_of(loader), rest);
    expect_equal(batches_of(resumed), batches_of(loader));
  }
}

// A dataset some of whose samples wait until they are let go.
struct Gated {
  at::Tensor get(size_t index) const {
    ++begun[index];
    begun[index].notify_all();
    if (held.contains(static_cast<int64_t>(index))) released.wait(false);
    return torch::tensor(static_cast<int64_t>(index));
  }
  size_t size() const { return 12; }
  void wait_for(size_t index) const { begun[index].wait(0); }
  void release() {
    released = true;
    released.notify_all();
  }
  std::set<int64_t> held;
  mutable std::array<std::atomic<int>, 12> begun{};
  std::atomic<bool> released = false;
};

TEST(Loader, ReadsAheadWhileABatchIsUsedAndNoFurtherThanAsked) {
  const auto dataset = std::make_shared<Gated>();
  Loader loader(dataset, {.batch_size = 2, .shuffle = false, .reading = {.num_workers = 1, .prefetch_factor = 2}});
  auto batch = loader.begin();
  EXPECT_THAT(numbers_of(*batch), ElementsAre(0, 1));
  dataset->wait_for(4);  // nobody asked for the third batch: it would never begin without a reader ahead
  dataset->wait_for(5);
  EXPECT_EQ(dataset->begun[6], 0) << "two batches ahead, for one worker";
  ++batch;
  dataset->wait_for(7);
  EXPECT_EQ(dataset->begun[8], 0);
}

TEST(Loader, WithoutOrderGivesWhatIsReadAndResumesWithoutARepeat) {
  const auto dataset = std::make_shared<Gated>();
  dataset->held = {0};
  LoaderOptions options{.batch_size = 2, .shuffle = false, .reading = {.num_workers = 2, .in_order = false}};
  Loader loader(dataset, options);
  std::vector<int64_t> seen;
  std::set<int64_t> left = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  nlohmann::json position;
  for (auto& batch : loader) {
    const auto numbers = numbers_of(batch);
    seen.insert(seen.end(), numbers.begin(), numbers.end());
    if (seen.size() == 4) {
      EXPECT_THAT(seen, Not(Contains(AnyOf(0, 1)))) << "the first batch is not read";
      for (const int64_t number : seen) left.erase(number);
      position = loader.state_dict();
      dataset->release();
    }
  }
  EXPECT_THAT(seen, SizeIs(12));
  EXPECT_THAT(std::set<int64_t>(seen.begin(), seen.end()), SizeIs(12));
  for (const int workers : {0, 2}) {
    options.reading.num_workers = workers;
    Loader resumed(std::make_shared<Gated>(), options);
    resumed.load_state_dict(position);
    std::set<int64_t> rest;
    for (auto& batch : resumed) {
      for (const int64_t number : numbers_of(batch)) EXPECT_TRUE(rest.insert(number).second);
    }
    EXPECT_EQ(rest, left);
    int64_t batches = 0;
    for (auto& batch : resumed) batches += batch.defined() ? 1 : 0;
    EXPECT_EQ(batches, 6) << "the next epoch is whole";
  }
  options.reading.in_order = true;
  Loader ordered(std::make_shared<Gated>(), options);
  EXPECT_THAT([&] { ordered.load_state_dict(position); }, ThrowsMessage<UsageError>(HasSubstr("in_order = false")));
  options.reading.in_order = false;
  Loader jumped(std::make_shared<Gated>(), options);
  jumped.load_state_dict(position);
  jumped.set_epoch(1);
  int64_t batches = 0;
  for (auto& batch : jumped) batches += batch.defined() ? 1 : 0;
  EXPECT_EQ(batches, 6) << "no batch of another epoch counts as given";
  options.batch_size = 3;
  Loader other(std::make_shared<Gated>(), options);
  EXPECT_THAT([&] { other.load_state_dict(position); },
              ThrowsMessage<UsageError>(HasSubstr("the same ranks and batch size")));
}

TEST(Loader, NamesTheSampleThatFailedAndGoesOnBehindIt) {
  struct Broken {
    at::Tensor get(size_t index) const {
      if (index == 5) throw std::runtime_error("the disk is wet");
      return torch::tensor(static_cast<int64_t>(index));
    }
    size_t size() const { return 12; }
  };
  for (const int workers : {0, 2}) {
    Loader loader(Broken(), {.batch_size = 2, .shuffle = false, .reading = {.num_workers = workers}});
    auto batch = loader.begin();
    ++batch;
    EXPECT_THAT([&] { ++batch; },
                ThrowsMessage<SampleError>(AllOf(HasSubstr("sample 5 of epoch 0"), HasSubstr("rank 0 of 1"),
                                                 HasSubstr("the disk is wet"),
                                                 HasSubstr(workers == 0 ? "no workers" : " of 2, rank 0"))));
    batch = loader.begin();
    EXPECT_THAT(numbers_of(*batch), ElementsAre(6, 7));
  }
  Loader loader(Broken(), {.batch_size = 6, .shuffle = false, .reading = {.num_workers = 1}});
  try {
    loader.begin();
    FAIL() << "the dataset throws";
  } catch (const SampleError& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error) << "the exception itself is in it";
  }
}

TEST(Loader, SaysWhatAWorkerReadsThatIsLateAndMayBeAskedAgain) {
  const auto dataset = std::make_shared<Gated>();
  dataset->held = {1};
  Loader loader(
      dataset,
      {.batch_size = 2, .shuffle = false, .reading = {.num_workers = 1, .timeout = std::chrono::milliseconds(1)}});
  bool was_late = false;
  try {
    loader.begin();
  } catch (const UsageError& error) {
    was_late = true;
    EXPECT_THAT(error.what(), AllOf(HasSubstr("samples 0, 1"), HasSubstr("timeout")));
  }
  EXPECT_TRUE(was_late);
  dataset->release();
  for (bool came = false; !came;) {
    try {
      EXPECT_THAT(numbers_of(*loader.begin()), ElementsAre(0, 1)) << "the batch is not lost";
      came = true;
    } catch (const UsageError&) {  // the machine is slow
    }
  }
}

TEST(Loader, EndsInTheMiddleOfAnEpoch) {
  const auto dataset = std::make_shared<Gated>();
  dataset->held = {3};
  std::thread release;
  {
    Loader loader(dataset, {.batch_size = 2, .shuffle = false, .reading = {.num_workers = 1, .prefetch_factor = 5}});
    EXPECT_THAT(numbers_of(*loader.begin()), ElementsAre(0, 1));
    dataset->wait_for(3);
    release = std::thread([&] {
      dataset->wait_for(3);
      dataset->release();
    });
  }
  release.join();
  EXPECT_EQ(dataset.use_count(), 1) << "no worker reads it any more";
}

TEST(Loader, AForkedChildHasNoWorkersAndEndsAll) {
  auto loader = std::make_unique<Loader<Gated>>(
      std::make_shared<Gated>(), LoaderOptions{.batch_size = 2, .shuffle = false, .reading = {.num_workers = 2}});
  EXPECT_THAT(numbers_of(*loader->begin()), ElementsAre(0, 1));
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      loader->begin();
    } catch (const UsageError&) {
      status = 0;
    }
    loader.reset();
    _exit(status);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_THAT(numbers_of(*loader->begin()), ElementsAre(2, 3)) << "the parent goes on";
}

TEST(Loader, CollatesStructuresOfAnyKind) {
  struct Nested {
    using Sample = std::map<std::string, std::tuple<at::Tensor, std::pair<int, float>, std::vector<at::Tensor>>>;
    Sample get(size_t index) const {
      const auto value = static_cast<int64_t>(index);
      return {
          {"x", {torch::full({2}, value), {static_cast<int>(index), 0.5F}, {torch::tensor(value), torch::ones({3})}}}};
    }
    size_t size() const { return 4; }
  };
  Loader loader(Nested(), {.batch_size = 4, .shuffle = false, .reading = {.num_workers = 1}});
  const auto& [tensor, pair, list] = loader.begin()->at("x");
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{4, 2}));
  EXPECT_TRUE(torch::equal(pair.first, torch::arange(4)));
  EXPECT_TRUE(torch::equal(pair.second, torch::full({4}, 0.5F)));
  ASSERT_THAT(list, SizeIs(2));
  EXPECT_TRUE(torch::equal(list[0], torch::arange(4)));
  EXPECT_EQ(list[1].sizes(), (std::vector<int64_t>{4, 3}));

  struct Dynamic {
    c10::IValue get(size_t index) const {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      dict.insert("ids", torch::tensor(static_cast<int64_t>(index)));
      dict.insert("rest", c10::ivalue::Tuple::create({static_cast<int64_t>(index), 0.25, true, std::string("a")}));
      return dict;
    }
    size_t size() const { return 3; }
  };
  Loader values(Dynamic(), {.batch_size = 3, .shuffle = false});
  const auto dict = values.begin()->toGenericDict();
  EXPECT_TRUE(torch::equal(dict.at("ids").toTensor(), torch::arange(3)));
  const auto rest = dict.at("rest").toTuple()->elements();
  EXPECT_TRUE(torch::equal(rest[0].toTensor(), torch::arange(3)));
  EXPECT_EQ(rest[1].toTensor().scalar_type(), at::kDouble);
  EXPECT_EQ(rest[2].toTensor().scalar_type(), at::kBool);
  EXPECT_EQ(rest[3].toList().size(), 3U);
}

TEST(Loader, NamesTheSamplesThatMakeNoBatchAndTakesACollateFunction) {
  struct Ragged {
    at::Tensor get(size_t index) const { return torch::ones({static_cast<int64_t>(index) + 1}); }
    size_t size() const { return 3; }
  };
  const LoaderOptions options{.batch_size = 3, .shuffle = false, .reading = {.num_workers = 1}};
  Loader ragged(Ragged(), options);
  EXPECT_THAT([&] { ragged.begin(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("of sample 0 is Float [1]"),
                                                                       HasSubstr("of sample 1 Float [2]"))));
  Loader padded(Ragged(), options, [](const std::vector<at::Tensor>& samples) {
    return std::pair(torch::nn::utils::rnn::pad_sequence(samples, /*batch_first=*/true), samples.size());
  });
  const auto batch = padded.begin();
  EXPECT_EQ(batch->first.sizes(), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(batch->second, 3U);
}

TEST(Loader, RanksShareAnEpochOfOwnOrdersAndBatches) {
  const auto twice = [](int64_t epoch) {
    std::vector<int64_t> order = {7, 7, 1, 2, 3, 4, 5};
    std::rotate(order.begin(), order.begin() + epoch % 7, order.end());
    return order;
  };
  for (const bool drop_last : {false, true}) {
    std::multiset<int64_t> seen;
    for (int rank = 0; rank < 2; ++rank) {
      Loader loader(Drawing(), {.batch_size = 2,
                                .rank = rank,
                                .world_size = 2,
                                .drop_last = drop_last,
                                .reading = {.num_workers = 2},
                                .order = twice});
      EXPECT_EQ(loader.size(), drop_last ? 1 : 2);
      for (const auto& batch : batches_of(loader)) {
        for (const int64_t number : numbers_of(batch.index)) seen.insert(number);
      }
    }
    EXPECT_EQ(seen,
              drop_last ? (std::multiset<int64_t>{7, 7, 1, 2}) : (std::multiset<int64_t>{7, 7, 1, 2, 3, 4, 5, 7}));
  }
  const auto lists = [](int64_t) { return std::vector<std::vector<int64_t>>{{0}, {1, 2}, {3, 4, 5}}; };
  std::vector<std::vector<int64_t>> given;
  for (int rank = 0; rank < 2; ++rank) {
    Loader loader(Drawing(), {.rank = rank, .world_size = 2, .batches = lists});
    for (const auto& batch : batches_of(loader)) given.push_back(numbers_of(batch.index));
  }
  EXPECT_THAT(given, ElementsAre(ElementsAre(0), ElementsAre(3, 4, 5), ElementsAre(1, 2), ElementsAre(0)));
  Loader wrong(Drawing(), {.order = [](int64_t) { return std::vector<int64_t>{23}; }});
  EXPECT_THAT([&] { wrong.begin(); }, ThrowsMessage<UsageError>(HasSubstr("has sample 23")));
}

// The numbers below `count`, with one that is drawn.
struct Numbers {
  auto open(const StreamPart& part) const {
    return [next = part.first, step = part.step, count = count]() mutable -> std::optional<Drawing::Sample> {
      if (next >= count) return std::nullopt;
      const at::Tensor number = torch::tensor(next);
      next += step;
      return Drawing::Sample{number, torch::rand({2}, sample_generator())};
    };
  }
  int64_t count = 21;
};

TEST(Loader, CutsAStreamOverRanksAndWorkersWithoutRepeats) {
  for (const bool drop_last : {false, true}) {
    std::vector<std::vector<Drawing::Sample>> reference;
    for (const int workers : {0, 1, 4}) {
      std::multiset<int64_t> seen;
      for (int rank = 0; rank < 2; ++rank) {
        Loader loader(Numbers(), {.batch_size = 4,
                                  .rank = rank,
                                  .world_size = 2,
                                  .drop_last = drop_last,
                                  .reading = {.num_workers = workers, .persistent_workers = rank == 1}});
        const auto batches = batches_of(loader);
        for (const auto& batch : batches) {
          for (const int64_t number : numbers_of(batch.index)) seen.insert(number);
        }
        if (workers == 0) reference.push_back(batches);
        expect_equal(batches, reference[static_cast<size_t>(rank)]);
        EXPECT_EQ(batches_of(loader).size(), batches.size()) << "the next epoch";
      }
      EXPECT_THAT(seen, SizeIs(drop_last ? 16 : 21));
      EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
    }
  }
}

TEST(Loader, GoesOnInAStreamWithOtherWorkersAndRanks) {
  Loader loader(Numbers(), {.batch_size = 2, .rank = 1, .world_size = 2, .reading = {.num_workers = 3}});
  batches_of(loader, 2);
  std::multiset<int64_t> rest;
  for (int rank = 0; rank < 3; ++rank) {
    Loader resumed(Numbers(), {.batch_size = 2, .rank = rank, .world_size = 3, .reading = {.num_workers = rank}});
    resumed.load_state_dict(loader.state_dict());
    for (const auto& batch : batches_of(resumed)) {
      for (const int64_t number : numbers_of(batch.index)) rest.insert(number);
    }
  }
  std::multiset<int64_t> expected;
  for (int64_t number = 8; number < 21; ++number) expected.insert(number);
  EXPECT_EQ(rest, expected);
}

TEST(Loader, AStreamGoesOnBehindABatchThatFailed) {
  struct Broken {
    auto open(const StreamPart& part) const {
      return [next = part.first, step = part.step]() mutable -> std::optional<at::Tensor> {
        const int64_t number = std::exchange(next, next + step);
        if (number == 5) throw std::runtime_error("the line is cut");
        return number < 12 ? std::optional(torch::tensor(number)) : std::nullopt;
      };
    }
  };
  for (const int workers : {0, 3}) {
    Loader loader(Broken(), {.batch_size = 4, .reading = {.num_workers = workers}});
    EXPECT_THAT(numbers_of(*loader.begin()), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT([&] { loader.begin(); },
                ThrowsMessage<SampleError>(AllOf(HasSubstr("sample 5 of epoch 0"), HasSubstr("the line is cut"))));
    EXPECT_THAT(numbers_of(*loader.begin()), ElementsAre(8, 9, 10, 11));
    EXPECT_EQ(loader.begin(), loader.end());
  }
}

TEST(Loader, RefusesOptionsByName) {
  const auto refused = [](const LoaderOptions& options, const char* text) {
    EXPECT_THAT([&] { Loader(Drawing(), options); }, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  refused({.reading = {.num_workers = -1}}, "num_workers");
  refused({.reading = {.prefetch_factor = 0}}, "prefetch_factor");
  refused({.rank = 2, .world_size = 2}, "rank 2 of 2");
  const auto none = [](int64_t) { return std::vector<std::vector<int64_t>>(); };
  refused({.batch_size = 2, .batches = none}, "batch_size = 2");
  EXPECT_THAT([] { Loader(Numbers(), {.reading = {.in_order = false}}); },
              ThrowsMessage<UsageError>(HasSubstr("in_order")));
  EXPECT_THAT([] { return sample_generator(); }, ThrowsMessage<UsageError>(HasSubstr("reads no sample")));
  EXPECT_FALSE(worker_info().has_value());
}

TEST(EngineLoader, ReadsAheadByTheSameRulesAndFollowsItsSampler) {
  struct Noisy {
    torch::data::Example<> get(size_t index) const {
      return {torch::tensor(static_cast<int64_t>(index)), torch::rand({2}, sample_generator())};
    }
    size_t size() const { return 25; }
  };
  const auto run = [](int workers) {
    DataLoader loader(Noisy(), {.micro_batch_size = 2, .loading = {.reading = {.num_workers = workers}}});
    std::vector<at::Tensor> seen;
    for (int i = 0; i < 20; ++i) {
      auto batch = loader.begin();
      if (batch == loader.end()) continue;
      seen.push_back(batch->data);
      seen.push_back(batch->target);
      EXPECT_EQ(numbers_of(batch->data), loader.indices());
      if (i == 3) loader.set_micro_batch_size(3);  // what was read ahead has two
      if (i == 6) loader.set_epoch(4);
    }
    return seen;
  };
  const auto expected = run(0);
  const auto found = run(3);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(torch::equal(found[i], expected[i])) << i;
  EXPECT_THAT([] { DataLoader(Noisy(), {.loading = {.reading = {.in_order = false}}}); },
              ThrowsMessage<UsageError>(HasSubstr("in_order")));
}

}  // namespace
}  // namespace ds::data
