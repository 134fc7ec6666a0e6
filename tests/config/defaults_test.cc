// Defaults are DeepSpeed's, and what is written reads back the same.
#include <gmock/gmock.h>

#include <fstream>

#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using nlohmann::ordered_json;

ordered_json file(const std::string& name) {
  std::ifstream in(std::string(DS_SOURCE_DIR) + "/tests/config/" + name);
  return ordered_json::parse(in);
}

// tests/config/defaults.json holds what DeepSpeed says (defaults.py made it).
TEST(Defaults, AreThoseOfDeepSpeed) {
  const ordered_json ours = to_json(parse_text("{}"));
  const ordered_json theirs = file("defaults.json");
  for (const auto& [section, keys] : theirs.items()) {
    ordered_json ours_here = ours;
    if (section != "top_level") {
      const ordered_json::json_pointer pointer("/" + section);
      ASSERT_TRUE(ours.contains(pointer)) << section;
      ours_here = ours[pointer];
    }
    for (const auto& [key, value] : keys.items()) {
      ASSERT_TRUE(ours_here.contains(key)) << section << "/" << key;
      EXPECT_EQ(ours_here[key], value) << section << "/" << key;
    }
  }
}

TEST(RoundTrip, TheDefaultsReadBack) {
  const ordered_json written = to_json(parse_text("{}"));
  const DsConfig again = parse(written);
  EXPECT_EQ(to_json(again), written);
  EXPECT_TRUE(again.warnings.empty()) << again.warnings.front();
}

TEST(RoundTrip, AFullConfigReadsBack) {
  const ordered_json written = to_json(
      parse_text("{train_batch_size: 16, gradient_accumulation_steps: 2, fp16: {enabled: true, loss_scale: 64},"
                 " optimizer: {type: 'Muon', params: {lr: 0.01, momentum: 0.9}},"
                 " scheduler: {type: 'OneCycle', params: {cycle_min_lr: [1e-5, 1e-6], cycle_max_lr: 1e-3}},"
                 " zero_optimization: {stage: 2, offload_optimizer: {device: 'cpu'}, zenflow: {update_interval: 4}},"
                 " data_types: {grad_accum_dtype: 'fp32', keep_in_fp32_modules: ['norm']},"
                 " communication_data_type: 'fp32', checkpoint: {writer: {}},"
                 " expert_parallel: {top_k: 2}, communication_backend: 'gloo'}",
                 {.dp_world_size = 4}));
  EXPECT_EQ(to_json(parse(written, {.dp_world_size = 4})), written);
}

}  // namespace
}  // namespace ds::engine::config
