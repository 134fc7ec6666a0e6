// Slices that live in a file: what they hold survives, whatever the number of buffers and whatever goes wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>

#include "core/check.h"
#include "core/memory/storage_memory.h"
#include "offload/slice_swapper.h"
#include "tests/offload/aligned_memory.h"
#include "tests/offload/open_descriptors.h"
#include "tests/support/scratch_folder.h"

namespace ds::offload {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

using Tensors = std::vector<at::Tensor>;

std::vector<int64_t> bytes_of(const Tensors& tensors) {
  std::vector<int64_t> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
  return bytes;
}

// Slices as plain tensors, and a swapper with copies of them.
class Swapping {
 public:
  Swapping(std::vector<Tensors> slices, int64_t buffer_count) : plain(std::move(slices)) {
    std::vector<std::vector<int64_t>> bytes;
    for (const Tensors& slice : plain) bytes.push_back(bytes_of(slice));
    const SwapSizes sizes = SliceSwapper::sizes(bytes, buffer_count);
    auto file = std::make_unique<AioFile>(folder_.path().string(), "optimizer", sizes.file_bytes,
                                          AioOptions{.block_size = 8192, .queue_depth = 4}, "nvme_path");
    path = file->path();
    swapper = std::make_unique<SliceSwapper>(std::move(file), aligned_bytes(sizes.buffer_bytes), buffer_count);
    for (const Tensors& slice : plain) {
      Tensors copies;
      for (const at::Tensor& tensor : slice) copies.push_back(tensor.clone());
      swapper->add(copies);
    }
  }

  // Whether slice `index` holds what `plain` does.
  bool equal(int64_t index) {
    bool equal = true;
    swapper->with(index, false, [&](int64_t slice) {
      for (size_t i = 0; i < plain[slice].size(); ++i) {
        equal = equal && swapper->tensors(slice)[i].equal(plain[slice][i]);
      }
    });
    return equal;
  }
  testing::AssertionResult all_equal() {
    for (int64_t i = 0; i < swapper->slice_count(); ++i) {
      if (!equal(i)) return testing::AssertionFailure() << "slice " << i << " differs";
    }
    return testing::AssertionSuccess();
  }
  std::vector<int64_t> order() const {
    std::vector<int64_t> all(plain.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  std::vector<Tensors> plain;
  std::unique_ptr<SliceSwapper> swapper;
  std::string path;

 private:
  test::ScratchFolder folder_;
};

std::vector<Tensors> random_slices(int64_t count) {
  std::vector<Tensors> slices;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t numel = 3000 + 977 * i;
    slices.push_back({torch::randn({numel}), torch::randn({numel}), torch::rand({numel}, at::kDouble)});
  }
  return slices;
}

void update(const Tensors& slice, int64_t seed) {
  const at::Tensor gradient = torch::full_like(slice[0], 0.25 * static_cast<double>(seed + 1));
  slice[1].mul_(0.9).add_(gradient, 0.1);
  slice[2].mul_(0.99).addcmul_(gradient.to(at::kDouble), gradient.to(at::kDouble), 0.01);
  slice[0].sub_(slice[1] / (slice[2].sqrt() + 1e-8).to(at::kFloat));
}

TEST(SliceSwapper, SizesAreWholeBlocks) {
  const SwapSizes sizes = SliceSwapper::sizes({{4, 4096}, {8193}, {}}, 3);
  EXPECT_EQ(sizes.file_bytes, 8192 + 12'288);
  EXPECT_EQ(sizes.buffer_bytes, 3 * 12'288);
}

TEST(SliceSwapper, ContentsOfOddSizesSurvive) {
  Swapping swapping({{torch::randn({1}), torch::randn({1023}, at::kDouble)},
                     {torch::randn({4097}).to(at::kBFloat16)},
                     {torch::randint(0, 255, {70'001}, at::kByte), torch::randn({0}), torch::randn({17})},
                     {torch::randn({100, 7})}},
                    2);
  for (const int64_t index : swapping.order()) {
    for (const at::Tensor& tensor : swapping.swapper->tensors(index)) EXPECT_EQ(tensor.storage().nbytes(), 0U);
  }
  EXPECT_TRUE(swapping.all_equal());
  for (const int64_t index : swapping.order()) {
    for (const at::Tensor& tensor : swapping.swapper->tensors(index)) EXPECT_EQ(tensor.storage().nbytes(), 0U);
  }
}

TEST(SliceSwapper, ReferencesAndViewsSeeTheTensorWhileItIsUsed) {
  const test::ScratchFolder folder;
  const SwapSizes sizes = SliceSwapper::sizes({{2000}}, 1);
  SliceSwapper swapper(
      std::make_unique<AioFile>(folder.path().string(), "optimizer", sizes.file_bytes, AioOptions{}, "nvme_path"),
      aligned_bytes(sizes.buffer_bytes), 1);
  const at::Tensor tensor = torch::randn({500});
  const at::Tensor view = tensor.slice(0, 100, 200);
  const at::Tensor values = tensor.clone();
  swapper.add({tensor});
  swapper.with(0, true, [&](int64_t) {
    EXPECT_TRUE(tensor.equal(values));
    EXPECT_TRUE(view.equal(values.slice(0, 100, 200)));
    view.zero_();
  });
  values.slice(0, 100, 200).zero_();
  swapper.with(0, false, [&](int64_t) { EXPECT_TRUE(tensor.equal(values)); });
}

TEST(SliceSwapper, StatesWithoutMemoryBeginAsZeros) {
  const test::ScratchFolder folder;
  const SwapSizes sizes = SliceSwapper::sizes({{20'000, 20'000, 40'000}, {20'000}}, 1);
  const at::Tensor buffers = random_bytes(sizes.buffer_bytes);
  SliceSwapper swapper(
      std::make_unique<AioFile>(folder.path().string(), "optimizer", sizes.file_bytes, AioOptions{}, "nvme_path"),
      buffers, 1);
  const at::Tensor master = torch::randn({5000});
  swapper.add({master.clone(), tensor_without_memory(5000, at::kFloat), tensor_without_memory(5000, at::kDouble)});
  swapper.add({tensor_without_memory(5000, at::kFloat)});
  buffers.fill_(7);
  swapper.for_each({0, 1}, [&](int64_t index) {
    const Tensors& tensors = swapper.tensors(index);
    if (index == 0) {
      EXPECT_TRUE(tensors[0].equal(master));
      EXPECT_TRUE(tensors[1].equal(torch::zeros({5000})));
      EXPECT_TRUE(tensors[2].equal(torch::zeros({5000}, at::kDouble)));
      tensors[2].fill_(3);
    } else {
      EXPECT_TRUE(tensors[0].equal(torch::zeros({5000})));
    }
  });
  swapper.with(0, false, [&](int64_t) {
    EXPECT_TRUE(swapper.tensors(0)[1].equal(torch::zeros({5000})));
    EXPECT_TRUE(swapper.tensors(0)[2].equal(torch::full({5000}, 3, at::kDouble)));
  });
}

struct Pass {
  int64_t buffers;
  PassOptions options;
};

class SliceSwapperPasses : public testing::TestWithParam<Pass> {};

std::vector<Pass> every_pass() {
  std::vector<Pass> passes;
  for (const int64_t buffers : {1, 2, 3, 5}) {
    for (const bool ahead : {false, true}) {
      for (const bool behind : {false, true}) passes.push_back({buffers, {ahead, behind}});
    }
  }
  return passes;
}

INSTANTIATE_TEST_SUITE_P(Options, SliceSwapperPasses, testing::ValuesIn(every_pass()), [](const auto& pass) {
  return cat(pass.param.buffers, "Buffers", pass.param.options.read_ahead ? "ReadAhead" : "",
             pass.param.options.write_behind ? "WriteBehind" : "");
});

TEST_P(SliceSwapperPasses, UpdatesAsInMemory) {
  Swapping swapping(random_slices(12), GetParam().buffers);
  std::vector<int64_t> order = swapping.order();
  for (int64_t step = 0; step < 3; ++step) {
    for (Tensors& slice : swapping.plain) update(slice, step);
    std::vector<int64_t> used;
    swapping.swapper->for_each(
        order,
        [&](int64_t index) {
          used.push_back(index);
          update(swapping.swapper->tensors(index), step);
        },
        GetParam().options);
    EXPECT_EQ(used, order);
    std::reverse(order.begin(), order.end());
  }
  EXPECT_TRUE(swapping.all_equal());
}

TEST_P(SliceSwapperPasses, WhatIsNotInTheOrderStays) {
  Swapping swapping(random_slices(6), GetParam().buffers);
  swapping.swapper->for_each(
      {4, 1}, [&](int64_t index) { update(swapping.swapper->tensors(index), 0); }, GetParam().options);
  update(swapping.plain[4], 0);
  update(swapping.plain[1], 0);
  EXPECT_TRUE(swapping.all_equal());
}

TEST_P(SliceSwapperPasses, AnExceptionOfUseLeavesItsSliceAndLaterOnesAsTheyWere) {
  Swapping swapping(random_slices(7), GetParam().buffers);
  EXPECT_THAT(
      [&] {
        swapping.swapper->for_each(
            swapping.order(),
            [&](int64_t index) {
              update(swapping.swapper->tensors(index), 0);
              if (index == 4) throw std::runtime_error("no");
            },
            GetParam().options);
      },
      ThrowsMessage<std::runtime_error>("no"));
  for (int64_t i = 0; i < 4; ++i) update(swapping.plain[i], 0);
  for (const at::Tensor& tensor : swapping.swapper->tensors(4)) EXPECT_EQ(tensor.storage().nbytes(), 0U);
  EXPECT_TRUE(swapping.all_equal());
}

TEST_P(SliceSwapperPasses, AFailedReadLeavesItsSliceAndLaterOnesUnused) {
  Swapping swapping(random_slices(6), GetParam().buffers);
  swapping.swapper->flush();
  std::vector<std::vector<int64_t>> before;
  for (int i = 0; i < 3; ++i) before.push_back(bytes_of(swapping.plain[i]));
  truncate_descriptor(open_descriptors_of(swapping.path).at(0), SliceSwapper::sizes(before, 1).file_bytes);
  std::vector<int64_t> used;
  EXPECT_THAT(
      [&] {
        swapping.swapper->for_each(
            swapping.order(),
            [&](int64_t index) {
              used.push_back(index);
              update(swapping.swapper->tensors(index), 0);
            },
            GetParam().options);
      },
      ThrowsMessage<IoError>(AllOf(HasSubstr("slice 3 could not be read"), HasSubstr(swapping.path))));
  EXPECT_THAT(used, ElementsAre(0, 1, 2));
  for (int64_t i = 0; i < 3; ++i) {
    update(swapping.plain[i], 0);
    EXPECT_TRUE(swapping.equal(i)) << i;
  }
}

TEST(SliceSwapper, WhatWasNotChangedIsNotWritten) {
  Swapping swapping(random_slices(2), 1);
  swapping.swapper->with(1, false, [&](int64_t index) { swapping.swapper->tensors(index)[0].zero_(); });
  EXPECT_TRUE(swapping.all_equal());
  swapping.swapper->with(1, true, [&](int64_t index) { swapping.swapper->tensors(index)[0].zero_(); });
  EXPECT_TRUE(swapping.equal(0));
  EXPECT_FALSE(swapping.equal(1));
}

TEST(SliceSwapper, TheTensorsStayWithoutMemoryWhenItIsGone) {
  Swapping swapping(random_slices(2), 2);
  const at::Tensor tensor = swapping.swapper->tensors(1)[0];
  swapping.swapper.reset();
  EXPECT_EQ(tensor.storage().nbytes(), 0U);
  EXPECT_EQ(tensor.storage().data(), nullptr);
  EXPECT_THAT(open_descriptors_of(swapping.path), testing::IsEmpty());
}

TEST(SliceSwapper, RefusesTensorsThatAreNotTheirOwn) {
  Swapping swapping(random_slices(3), 2);
  const at::Tensor whole = torch::randn({10});
  const auto add = [&](Tensors tensors) { return [&swapping, tensors] { swapping.swapper->add(tensors); }; };
  EXPECT_THAT(add({whole.slice(0, 0, 5)}), ThrowsMessage<UsageError>(HasSubstr("the whole of its storage")));
  EXPECT_THAT(add({torch::randn({4, 5}).t()}), ThrowsMessage<UsageError>(HasSubstr("contiguous")));
  EXPECT_THAT(add({whole, whole.view({2, 5})}), ThrowsMessage<UsageError>(HasSubstr("a storage of its own")));
  EXPECT_THAT(add({swapping.swapper->tensors(0)[0]}), ThrowsMessage<UsageError>(HasSubstr("a storage of its own")));
  EXPECT_THAT(add({whole}), ThrowsMessage<UsageError>(HasSubstr("SliceSwapper::sizes()")));
  EXPECT_EQ(swapping.swapper->slice_count(), 3);
  EXPECT_TRUE(swapping.all_equal());
}

TEST(SliceSwapper, RefusesCallsOutOfPlace) {
  Swapping swapping(random_slices(3), 2);
  SliceSwapper& swapper = *swapping.swapper;
  EXPECT_THAT([&] { swapper.for_each({0, 3}, [](int64_t) {}); }, ThrowsMessage<UsageError>(HasSubstr("from 0 to 2")));
  EXPECT_THAT([&] { swapper.for_each({0, 1, 0}, [](int64_t) {}); }, ThrowsMessage<UsageError>(HasSubstr("twice")));
  EXPECT_THAT([&] { swapper.with(0, false, [&](int64_t) { swapper.flush(); }); },
              ThrowsMessage<UsageError>(HasSubstr("from within")));
  EXPECT_THAT(
      [&] {
        swapper.with(0, true,
                     [&](int64_t) { give_storage(swapper.tensors(0)[0], c10::DataPtr(nullptr, at::kCPU), 0); });
      },
      ThrowsMessage<UsageError>(HasSubstr("change them in place")));
  EXPECT_TRUE(swapping.all_equal());
}

}  // namespace
}  // namespace ds::offload
