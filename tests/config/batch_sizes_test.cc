// train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.
#include <gmock/gmock.h>

#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Triple {
  int64_t train, micro, accumulation;
  bool operator==(const Triple&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Triple& triple) {
  return out << triple.train << " = " << triple.micro << " x " << triple.accumulation;
}

Triple resolved(const std::string& text, int64_t ranks, const AutoValues& values = {}) {
  const DsConfig config = parse_text(text, {.dp_world_size = ranks, .auto_values = values});
  return {config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps};
}

TEST(BatchSizes, MissingOnesFollowFromTheOthers) {
  EXPECT_EQ(resolved("{train_batch_size: 24}", 4), (Triple{24, 6, 1}));
  EXPECT_EQ(resolved("{train_micro_batch_size_per_gpu: 3}", 4), (Triple{12, 3, 1}));
  EXPECT_EQ(resolved("{train_batch_size: 24, train_micro_batch_size_per_gpu: 3}", 4), (Triple{24, 3, 2}));
  EXPECT_EQ(resolved("{train_batch_size: 24, gradient_accumulation_steps: 3}", 4), (Triple{24, 2, 3}));
  EXPECT_EQ(resolved("{train_micro_batch_size_per_gpu: 3, gradient_accumulation_steps: 2}", 4), (Triple{24, 3, 2}));
  EXPECT_EQ(resolved("{train_batch_size: 24, train_micro_batch_size_per_gpu: 3, gradient_accumulation_steps: 2}", 4),
            (Triple{24, 3, 2}));
}

TEST(BatchSizes, NullIsAbsentAndTextIsANumber) {
  EXPECT_EQ(resolved("{train_batch_size: null, train_micro_batch_size_per_gpu: '8'}", 1), (Triple{8, 8, 1}));
}

TEST(BatchSizes, TooManyRanksForABatchAreTold) {
  EXPECT_THAT(refusal_of("{train_batch_size: 4}", {.dp_world_size = 8}),
              AllOf(HasSubstr("found 4 != 0 x 1 x 8"), HasSubstr("or run on 4 data-parallel ranks"),
                    HasSubstr("the batch is too small for so many ranks")));
}

TEST(BatchSizes, NumbersThatDoNotFitAreShownWithWhatWouldFit) {
  EXPECT_THAT(refusal_of("{train_batch_size: 20, train_micro_batch_size_per_gpu: 3}", {.dp_world_size = 2}),
              AllOf(HasSubstr("found 20 != 3 x 3 x 2"), HasSubstr("gradient_accumulation_steps 3 (derived)"),
                    HasSubstr("set train_batch_size to 18 or 24")));
  EXPECT_THAT(refusal_of("{train_batch_size: 64, train_micro_batch_size_per_gpu: 8, gradient_accumulation_steps: 1}"),
              AllOf(HasSubstr("found 64 != 8 x 1 x 1"), HasSubstr("set train_batch_size to 8"),
                    HasSubstr("gradient_accumulation_steps to 8"), HasSubstr("train_micro_batch_size_per_gpu to 64"),
                    HasSubstr("run on 8 data-parallel ranks")));
  EXPECT_THAT(refusal_of("{train_batch_size: 2}", {.dp_world_size = 4}), HasSubstr("set train_batch_size to 4"));
}

// DeepSpeed's batch has one part for each group of ranks that share a sequence.
TEST(BatchSizes, ASequenceAxisIsNoPartOfTheBatch) {
  const std::string text = "{train_batch_size: 8, train_micro_batch_size_per_gpu: 4, sequence_parallel_size: 2}";
  EXPECT_EQ(parse_text(text, {.world_size = 4}).dp_world_size, 2);
  EXPECT_THAT(refusal_of(text, {.world_size = 5}),
              AllOf(HasSubstr("sequence_parallel_size: expected a divisor of the 5 ranks"), HasSubstr("found 2")));
  EXPECT_THAT(refusal_of("{train_batch_size: 7, train_micro_batch_size_per_gpu: 4, sequence_parallel_size: 2}",
                         {.world_size = 4}),
              AllOf(HasSubstr("found 7 != 4 x 0 x 2"), HasSubstr("each shared by 2 ranks (sequence_parallel_size)")));
}

TEST(BatchSizes, ZeroNegativeAndHugeAreRefused) {
  EXPECT_THAT(refusal_of("{train_batch_size: 0}"), HasSubstr("expected an integer > 0, found 0"));
  EXPECT_THAT(refusal_of("{train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: -1}"),
              HasSubstr("gradient_accumulation_steps: expected an integer > 0, found -1"));
  EXPECT_THAT(refusal_of("{train_micro_batch_size_per_gpu: 9e15, gradient_accumulation_steps: 9000000}"),
              HasSubstr("64 bits"));
  EXPECT_THAT(refusal_of("{train_batch_size: 1.5}"), HasSubstr("expected an integer"));
}

TEST(BatchSizes, OneOfTwoIsNeeded) {
  try {
    parse(nlohmann::json{{"gradient_accumulation_steps", 4}});
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("found neither"), HasSubstr("train_micro_batch_size_per_gpu")));
  }
}

TEST(BatchSizes, AutoIsFilledByTheProgramOrDerived) {
  const std::string all_auto =
      "{train_batch_size: 'auto', train_micro_batch_size_per_gpu: 'auto', gradient_accumulation_steps: 'auto'}";
  AutoValues values;
  values.train_micro_batch_size_per_gpu = 2;
  values.gradient_accumulation_steps = 4;
  EXPECT_EQ(resolved(all_auto, 2, values), (Triple{16, 2, 4}));
  EXPECT_THAT(refusal_of(all_auto), HasSubstr("the program gives neither"));

  const DsConfig config = parse_text("{train_batch_size: 'auto', train_micro_batch_size_per_gpu: 2}");
  ASSERT_EQ(config.resolved_auto.size(), 1U);
  EXPECT_EQ(config.resolved_auto[0].value, 2);
  EXPECT_EQ(config.resolved_auto[0].source, "the other batch sizes");
}

}  // namespace
}  // namespace ds::engine::config
