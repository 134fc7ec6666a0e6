#include "config/comms_operations.h"

#include <gmock/gmock.h>

#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using comm::CollectiveKind;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(CommsOperations, HaveNamesOfBothLibraries) {
  EXPECT_EQ(find_operation("reduce_scatter"), CollectiveKind::kReduceScatter);
  EXPECT_EQ(find_operation("reduce_scatter_tensor"), CollectiveKind::kReduceScatter);
  EXPECT_EQ(find_operation("all_to_all_single"), CollectiveKind::kAllToAll);
  EXPECT_EQ(find_operation("isend"), CollectiveKind::kSend);
  EXPECT_EQ(find_operation("allreduce"), std::nullopt);
}

TEST(CommsLoggerSection, IsRead) {
  const DsConfig config = parse_text("{comms_logger: {enabled: true, prof_ops: ['all_gather_into_tensor']}}");
  EXPECT_TRUE(config.comms_logger.enabled);
  EXPECT_TRUE(config.comms_logger.prof_all) << "DeepSpeed's default";
  EXPECT_THAT(unsupported_features(config), IsEmpty());
}

TEST(CommsLoggerSection, ANameThatIsNoneIsRefusedWithThoseThereAre) {
  EXPECT_THAT(refusal_of("{comms_logger: {enabled: true, prof_all: false, prof_ops: ['allreduce']}}"),
              AllOf(HasSubstr("comms_logger.prof_ops"), HasSubstr("found \"allreduce\""),
                    HasSubstr("all_gather_into_tensor"), HasSubstr(" or barrier")));
}

}  // namespace
}  // namespace ds::engine::config
