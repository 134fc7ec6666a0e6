// What a user sees when something is wrong: a clear message, a non-zero exit code, within seconds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/parity/gpt_job.h"

namespace ds::test {
namespace {

using testing::HasSubstr;
using testing::Not;

GptResult expect_failure(const GptJob& job) {
  const auto begin = std::chrono::steady_clock::now();
  GptResult result = try_gpt(job);
  EXPECT_NE(result.exit_code, 0) << result.output;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "a failure must not hang";
  EXPECT_THAT(result.output, Not(HasSubstr("terminate called"))) << "an error must be reported, not abort the program";
  return result;
}

TEST(BadInput, NearMissOfAKeyIsNamedWithItsLine) {
  nlohmann::json config = reference_config(1, 1, 1);
  config["gradient_clipp1ng"] = 1.0;
  const GptResult run = expect_failure({.config = config, .ranks = 2, .steps = 1});
  EXPECT_THAT(run.output, HasSubstr("gradient_clipp1ng"));
  EXPECT_THAT(run.output, HasSubstr("did you mean gradient_clipping"));
}

TEST(BadInput, WrongTypeNamesPathAndValue) {
  nlohmann::json config = reference_config(1, 1, 1);
  config["zero_optimization"]["reduce_bucket_size"] = "many";
  const GptResult run = expect_failure({.config = config, .ranks = 2, .steps = 1});
  EXPECT_THAT(run.output, HasSubstr("reduce_bucket_size"));
  EXPECT_THAT(run.output, HasSubstr("many"));
}

TEST(BadInput, BatchThatDoesNotDivideNamesTheNumbers) {
  nlohmann::json config = reference_config(1, 4, 2);
  config["train_batch_size"] = 13;
  const GptResult run = expect_failure({.config = config, .ranks = 2, .steps = 1});
  EXPECT_THAT(run.output, HasSubstr("train_batch_size"));
  EXPECT_THAT(run.output, HasSubstr("13"));
}

TEST(BadInput, AFeatureThatDoesNotRunYetIsRefusedByName) {
  nlohmann::json config = reference_config(2, 1, 1);
  config["zero_optimization"]["zenflow"] = {{"topk_ratio", 0.1}};
  const GptResult run = expect_failure({.config = config, .ranks = 2, .steps = 1});
  EXPECT_THAT(run.output, HasSubstr("zenflow"));
}

TEST(BadInput, MissingFiles) {
  const GptResult data = expect_failure({.config = reference_config(0, 1, 1), .steps = 1, .data = "/no/such/corpus"});
  EXPECT_THAT(data.output, HasSubstr("/no/such/corpus"));
  const GptResult weights = expect_failure(
      {.config = reference_config(0, 1, 1), .steps = 1, .arguments = {"--init", "/no/such.safetensors"}});
  EXPECT_THAT(weights.output, HasSubstr("/no/such.safetensors"));
}

TEST(BadInput, OutputThatCannotBeWrittenIsRefusedBeforeTraining) {
  const GptResult run = expect_failure(
      {.config = reference_config(0, 1, 1), .steps = 100000, .arguments = {"--save", "/no/such/folder/w.safetensors"}});
  EXPECT_THAT(run.output, HasSubstr("/no/such/folder"));
}

TEST(BadInput, ALossThatIsNotFiniteEndsTheRunWithItsStep) {
  nlohmann::json config = reference_config(0, 1, 1);
  config["optimizer"]["params"]["lr"] = 1e30;
  const GptResult run = expect_failure({.config = config, .ranks = 2, .steps = 1000});
  EXPECT_THAT(run.output, HasSubstr("step "));
  EXPECT_THAT(run.output, testing::ContainsRegex("nan|NaN|not finite|inf"));
}

TEST(BadInput, MissingConfigAndBrokenJson) {
  const std::string gpt = std::string(" '") + DS_GPT + "' --steps 1 --deepspeed_config ";
  auto [missing_code, missing] = launch("--num_procs 2" + gpt + "/no/such/config.json");
  EXPECT_NE(missing_code, 0);
  EXPECT_THAT(missing, HasSubstr("/no/such/config.json"));
  const auto path = std::filesystem::temp_directory_path() / ("broken_" + std::to_string(getpid()) + ".json");
  std::ofstream(path) << "{\n  \"train_batch_size\": 8,\n  \"fp16\": {\n";
  auto [broken_code, broken] = launch("--num_procs 2" + gpt + path.string());
  std::filesystem::remove(path);
  EXPECT_NE(broken_code, 0);
  EXPECT_THAT(broken, HasSubstr("line"));
}

TEST(BadInput, PortInUse) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  socklen_t length = sizeof address;
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const std::string port = std::to_string(ntohs(address.sin_port));
  auto [code, output] = launch("--num_procs 2 --master_port " + port + " /bin/true");
  close(listener);
  EXPECT_NE(code, 0);
  EXPECT_THAT(output, HasSubstr(port));
}

TEST(BadInput, ARankThatIsKilledIsNamedAndTheOthersEnd) {
  const GptResult run = expect_failure(
      {.config = reference_config(2, 1, 1), .ranks = 2, .steps = 1000000, .during = [](const auto& metrics) {
         kill(process_of_rank(metrics, 1), SIGKILL);
       }});
  EXPECT_EQ(run.exit_code, 128 + SIGKILL) << run.output;
  EXPECT_THAT(run.output, HasSubstr("rank 1"));
  EXPECT_THAT(run.output, HasSubstr("SIGKILL"));
}

// The others wait for it in the middle of a layer.
TEST(BadInput, AKilledRankOfATensorAxisIsNamedAndTheOthersEnd) {
  nlohmann::json config = reference_config(2, 1, 1);
  config["tensor_parallel"] = {{"autotp_size", 2}};
  const GptResult run =
      expect_failure({.config = config, .ranks = 2, .steps = 1000000, .during = [](const auto& metrics) {
                        kill(process_of_rank(metrics, 1), SIGKILL);
                      }});
  EXPECT_EQ(run.exit_code, 128 + SIGKILL) << run.output;
  EXPECT_THAT(run.output, HasSubstr("rank 1"));
  EXPECT_THAT(run.output, HasSubstr("SIGKILL"));
}

}  // namespace
}  // namespace ds::test
