// The files in configs/ run, and its README explains every key.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/plan/plan.h"
#include "config/supported.h"
#include "core/text.h"
#include "dsengine/config.h"

namespace ds::engine::config {
namespace {

const std::filesystem::path kFolder = std::filesystem::path(DS_SOURCE_DIR) / "configs";

TEST(ShippedConfigs, ParseAndRunOnTwoRanks) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    const DsConfig config = parse(entry.path(), {.dp_world_size = 2, .strict = true});
    EXPECT_TRUE(config.warnings.empty()) << entry.path() << ": " << config.warnings.front();
    EXPECT_TRUE(unsupported_features(config).empty()) << entry.path();
    const int64_t stages = config.pipeline.stages.value_or(1);
    const int64_t tensor = config.tensor_parallel.size();
    const int64_t sequence = config.sequence_ranks();
    EXPECT_NO_THROW(engine::make_plan(config,
                                      {.world_size = 2 * stages * tensor * sequence,
                                       .dp = 2 * sequence,
                                       .pipe = stages,
                                       .tensor = tensor,
                                       .sequence = sequence},
                                      {.pipeline_module = stages > 1}))
        << entry.path();
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(config.optimizer.type, name == "onebit_adam.json"     ? "OneBitAdam"
                                     : name == "zero_one_adam.json" ? "ZeroOneAdam"
                                     : name == "muon.json"          ? "Muon"
                                                                    : "AdamW")
        << entry.path();
    EXPECT_EQ(config.optimizer.values.lr, 1e-3) << entry.path();
    EXPECT_EQ(config.train_micro_batch_size_per_gpu, 4) << entry.path();
    EXPECT_EQ(config.gradient_clipping, 1.0) << entry.path();
  }
  EXPECT_GE(files, 5);
}

TEST(ShippedConfigs, SayWhatTheirNamesSay) {
  const auto shipped = [](const char* name) { return parse(kFolder / name, {.dp_world_size = 2}); };
  EXPECT_EQ(shipped("zero0.json").zero_optimization.stage, 0);
  EXPECT_EQ(shipped("zero1.json").zero_optimization.stage, 1);
  EXPECT_EQ(shipped("zero2.json").zero_optimization.stage, 2);
  EXPECT_EQ(shipped("bf16.json").model_dtype(), DType::kBFloat16);
  EXPECT_EQ(shipped("fp16.json").model_dtype(), DType::kFloat16);
  EXPECT_EQ(shipped("fp16.json").fp16.loss_scale, 0);
}

// The part of `text` from the heading with `name` to the next heading; empty: no such heading.
std::string part_of(const std::string& text, const std::string& heading, const std::string& name) {
  const size_t begin = text.find(cat("\n", heading, " ", name));
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find("\n#", begin + 1) - begin);
}

bool names(const std::string& text, const std::string& key) {
  return text.find(cat("`", key, "`")) != std::string::npos;
}

// Refused and unused sections are named as a whole; every other key stands under the heading of its section.
bool explained(const std::string& readme, const std::string& path) {
  const std::string whole_sections =
      part_of(readme, "##", "Refused") + part_of(readme, "##", "Python only") + part_of(readme, "##", "Without effect");
  for (size_t dot = path.find('.');; dot = path.find('.', dot + 1)) {
    if (names(whole_sections, path.substr(0, dot))) return true;
    if (dot == std::string::npos) break;
  }
  const size_t last = path.rfind('.');
  if (last == std::string::npos) return names(readme, path);
  return names(part_of(readme, "###", cat("`", path.substr(0, last), "`")), path.substr(last + 1));
}

TEST(ShippedConfigs, TheReadmeNamesEveryKey) {
  std::ifstream in(kFolder / "README.md");
  std::ostringstream text;
  text << in.rdbuf();
  const std::string readme = std::move(text).str();
  std::string missing;
  for (const std::string& path : known_keys()) {
    if (!explained(readme, path)) missing += cat("\n  ", path);
  }
  EXPECT_TRUE(missing.empty()) << "configs/README.md does not name:" << missing;
}

}  // namespace
}  // namespace ds::engine::config
