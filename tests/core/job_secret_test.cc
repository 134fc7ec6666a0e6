#include "core/secret/job_secret.h"

#include <gmock/gmock.h>

#include <string>

#include "core/check.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST(JobSecret, IsAnotherOneEachTime) {
  const std::string one = new_job_secret();
  EXPECT_EQ(one.size(), 64U);
  EXPECT_EQ(one.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(one, new_job_secret());
  EXPECT_NE(JobSecret(one).key_prefix(), JobSecret(new_job_secret()).key_prefix());
}

TEST(JobSecret, ComesFromTheEnvironment) {
  const auto with = [](const std::string& value) {
    return JobSecret::from_environment(
        [&](const char* name) { return std::string(name) == "DS_JOB_SECRET" ? std::optional(value) : std::nullopt; });
  };
  EXPECT_EQ(with("0123456789abcdef")->key_prefix(), JobSecret("0123456789abcdef").key_prefix());
  EXPECT_FALSE(with(""));
  EXPECT_FALSE(JobSecret::from_environment([](const char*) { return std::nullopt; }));
  EXPECT_THAT([&] { with("hush-hush"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("DS_JOB_SECRET"), HasSubstr("16"), Not(HasSubstr("hush")))));
}

TEST(JobSecret, ProvesWhoWroteAMessage) {
  const JobSecret job(new_job_secret());
  const JobSecret other(new_job_secret());
  const std::string proof = job.proof_of("arrival of rank 1", "here");
  EXPECT_TRUE(job.proves(proof, "arrival of rank 1", "here"));
  EXPECT_FALSE(job.proves(proof, "arrival of rank 1", "there"));
  EXPECT_FALSE(job.proves(proof, "arrival of rank 2", "here"));
  EXPECT_FALSE(job.proves(job.proof_of("a", "bc"), "ab", "c"));
  EXPECT_FALSE(other.proves(proof, "arrival of rank 1", "here"));
  EXPECT_FALSE(job.proves("", "arrival of rank 1", "here"));
}

}  // namespace
}  // namespace ds
