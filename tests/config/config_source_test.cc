// A file, base64 text or an object.
#include "config/config_source.h"

#include <gmock/gmock.h>

#include "tests/config/parse_text.h"
#include "tests/config/scratch_file.h"
#include "tests/support/thrown.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const ConfigSource& source) {
  return test::thrown_by<ConfigError>([&] { parse(source); }, "");
}

TEST(ConfigSource, ReadsAFileAsPeopleWriteIt) {
  const ScratchFile file("{\n  // comment\n  'train_batch_size': 8,\n  fp16: {enabled: false,},\n}\n");
  const DsConfig config = parse(file.path());
  EXPECT_EQ(config.train_batch_size, 8);
  EXPECT_EQ(config.source, file.path());
}

TEST(ConfigSource, ReadsBase64) {
  // {"train_batch_size": 4}
  const DsConfig config = parse("eyJ0cmFpbl9iYXRjaF9zaXplIjogNH0=");
  EXPECT_EQ(config.train_batch_size, 4);
  EXPECT_EQ(config.source, "base64 text");
  EXPECT_EQ(parse("eyJ0cmFpbl9iYXRjaF9zaXplIjogNH0").train_batch_size, 4);  // padding left out
}

TEST(ConfigSource, ReadsAnObject) {
  EXPECT_EQ(parse(nlohmann::json{{"train_batch_size", 2}}).train_batch_size, 2);
  EXPECT_EQ(parse(nlohmann::ordered_json{{"train_batch_size", 2}}).source, "JSON object");
}

TEST(ConfigSource, AMissingFileIsNamed) {
  EXPECT_THAT(refusal("nowhere/ds_config.json"), AllOf(HasSubstr("nowhere/ds_config.json"), HasSubstr("no such file")));
  EXPECT_THAT(refusal(std::filesystem::path("eyJ0cmFpbl9iYXRjaF9zaXplIjogNH0=")), HasSubstr("no such file"));
  EXPECT_THAT(refusal(ConfigSource()), HasSubstr("no ds_config"));
  EXPECT_THAT(refusal(::testing::TempDir()), HasSubstr("found a folder"));
}

TEST(ConfigSource, AnEmptyFileIsSaidToBeEmpty) {
  for (const char* text : {"", " \n\t\n", "\xEF\xBB\xBF\n"}) {
    const ScratchFile file(text);
    EXPECT_THAT(refusal(file.path()), AllOf(HasSubstr(file.path()), HasSubstr("the file is empty")));
  }
}

TEST(ConfigSource, OnlyRegularFilesAreRead) {
  EXPECT_THAT(refusal("/dev/zero"), HasSubstr("expected a file, found a device"));
  const ScratchFile file("");
  std::filesystem::resize_file(file.path(), (16 << 20) + 1);
  EXPECT_THAT(refusal(file.path()), HasSubstr("expected at most 16 MiB, found 16777217 bytes"));
}

TEST(ConfigSource, SyntaxErrorsAndOtherRootsAreRefused) {
  const ScratchFile open("{\"train_batch_size\": 1,\n");
  EXPECT_THAT(refusal(open.path()), AllOf(HasSubstr(open.path()), HasSubstr("not closed")));
  EXPECT_THAT(refusal(nlohmann::json::array({1})), HasSubstr("expected an object {...}, found [1]"));
}

TEST(ConfigSource, DuplicateKeysAreErrorsWithTheirLines) {
  const ScratchFile file(
      "{\n\"train_batch_size\": 1,\n\"zero_optimization\": {\n\"stage\": 1,\n\"stage\": 2\n},\n"
      "\"train_batch_size\": 2\n}");
  EXPECT_THAT(refusal(file.path()), AllOf(HasSubstr("2 mistakes"), HasSubstr("train_batch_size"),
                                          HasSubstr("is given 2 times, in lines 2, 7; keep one"),
                                          HasSubstr("zero_optimization.stage"), HasSubstr("in lines 4, 5")));
}

}  // namespace
}  // namespace ds::engine::config
