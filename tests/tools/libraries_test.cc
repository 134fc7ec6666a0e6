#include "tools/report/libraries.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "tests/support/scratch_folder.h"

namespace ds::tool::report {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string line_of(const Section& section, const std::string& name) {
  for (const Fact& fact : section.facts()) {
    if (fact.name == name) return fact.lines.at(0);
  }
  return {};
}

ordered_json answer_of(const std::string& script) {
  const test::ScratchFolder folder;
  const std::string program = folder.write("ds-tool-libraries", "#!/bin/sh\n" + script);
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  return ask_libraries(folder.path());
}

TEST(AskLibraries, TakesTheAnswer) {
  EXPECT_EQ(answer_of("echo '{\"cuda\": {}}'"), ordered_json::parse(R"({"cuda": {}})"));
}

TEST(AskLibraries, SaysWhyThereIsNone) {
  EXPECT_THAT(answer_of("echo loading >&2; echo libtorch_cpu.so: not found >&2; exit 127")["error"].get<std::string>(),
              AllOf(HasSubstr("exit code 127"), HasSubstr("libtorch_cpu.so: not found")));
  EXPECT_THAT(answer_of("echo no json")["error"].get<std::string>(), HasSubstr("expected JSON"));
  EXPECT_THAT(ask_libraries("/no/such/folder")["error"].get<std::string>(), HasSubstr("No such file"));
}

TEST(Devices, AreListedWithTheirPeers) {
  const auto devices = ordered_json::parse(
      R"({"driver": "580", "cuda": "13.0", "devices": [{"index": 0, "name": "H", "bytes": 1073741824, "free": 536870912,
          "peers": {"1": "NVLink"}}]})");
  const auto libraries = ordered_json::parse(R"({"cuda": {"loads": true, "usable_devices": 1, "nccl": "2.28.9"}})");
  const Section section = describe_devices(devices, libraries, 1);
  EXPECT_EQ(line_of(section, "gpus"), "0: H, 1.0 GiB, 512.0 MiB free; to 1: NVLink");
  EXPECT_EQ(line_of(section, "driver"), "580, for CUDA up to 13.0");
  EXPECT_EQ(line_of(section, "libdsengine_cuda"), "loads; usable GPUs: 1; NCCL 2.28.9");
}

TEST(Devices, AreMissedWithTheReason) {
  const Section section = describe_devices({{"error", "no library"}}, {{"error", "no LibTorch"}}, 2);
  EXPECT_THAT(line_of(section, "gpus"), AllOf(HasSubstr("no library"), HasSubstr("2 /dev/nvidia")));
  EXPECT_EQ(line_of(section, "libdsengine_cuda"), "not asked: no LibTorch");
}

TEST(Backends, SayWhyTheyDoNotWork) {
  const auto libraries = ordered_json::parse(
      R"({"backends": {"gloo": {"works": true}, "shm": {"works": false, "refusal": "/dev/shm is full"},
                       "nccl": {"works": false, "refusal": "no file"}}, "cuda": {"loads": false, "refusal": "no file"}})");
  const Section section = describe_backends(libraries);
  EXPECT_EQ(line_of(section, "gloo"), "works");
  EXPECT_EQ(line_of(section, "shm"), "no: /dev/shm is full");
  EXPECT_THAT(line_of(section, "nccl"), HasSubstr("cannot be loaded, see above"));
  EXPECT_EQ(line_of(describe_backends({{"error", "crashed"}}), "gloo"), "not asked: crashed");
}

}  // namespace
}  // namespace ds::tool::report
