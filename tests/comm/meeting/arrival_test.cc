// What a rank writes into the store, and what others believe of it.
#include "comm/meeting/arrival.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "comm/meeting/host_identity.h"
#include "core/check.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

const RankPlace kPlace{"worker-1", 4711, "0d0e/25.1/4.2", "10.0.0.2"};
const std::optional<JobSecret> kSecret = JobSecret("0123456789abcdef0123456789abcdef");
const std::optional<JobSecret> kOther = JobSecret("another job's secret, an earlier one");

TEST(Arrival, IsReadAsItWasWritten) {
  for (const std::optional<JobSecret>& secret : {std::optional<JobSecret>(), kSecret}) {
    const RankPlace found = read_arrival(arrival_text(kPlace, 1, 2, secret), 1, 2, secret);
    EXPECT_EQ(found.host_name, "worker-1");
    EXPECT_EQ(found.process, 4711);
    EXPECT_EQ(found.domain, kPlace.domain);
    EXPECT_EQ(found.address, "10.0.0.2");
  }
  EXPECT_EQ(text_of(kPlace), "worker-1, pid 4711");
}

TEST(Arrival, TheSecretIsNotInIt) {
  EXPECT_THAT(arrival_text(kPlace, 1, 2, kSecret), Not(HasSubstr("0123456789abcdef0123456789abcdef")));
}

TEST(Arrival, IsNotBelievedWithoutProof) {
  const auto refused = [](const std::string& text, int rank) {
    EXPECT_THAT([&] { read_arrival(text, rank, 2, kSecret); },
                ThrowsMessage<CommError>(AllOf(HasSubstr("rank 1's place"), HasSubstr("DS_JOB_SECRET"))))
        << text;
  };
  refused(arrival_text(kPlace, 1, 2, {}), 1);
  refused(arrival_text(kPlace, 1, 2, kOther), 1);   // a replay of an earlier job
  refused(arrival_text(kPlace, 0, 2, kSecret), 1);  // of another rank of this one
  auto changed = nlohmann::json::parse(arrival_text(kPlace, 1, 2, kSecret));
  changed["address"] = "10.6.6.6";
  refused(changed.dump(), 1);
  changed["proof"] = 7;
  refused(changed.dump(), 1);
}

TEST(Arrival, WhatIsNoneIsRefused) {
  for (const char* text : {"", "[]", "{", "noise", R"({"host":"a"})", R"({"host":1,"pid":"x"})",
                           R"({"host":"a","pid":1e300,"domain":"","address":"","world_size":4})"}) {
    EXPECT_THAT([&] { read_arrival(text, 3, 4, {}); }, ThrowsMessage<CommError>(HasSubstr("rank 3"))) << text;
  }
  EXPECT_THAT([&] { read_arrival(std::string(1'000'000, '['), 3, 4, {}); },
              ThrowsMessage<CommError>(HasSubstr("rank 3")));
  EXPECT_THAT([&] { read_arrival(arrival_text(kPlace, 1, 3, kSecret), 1, 2, kSecret); },
              ThrowsMessage<CommError>(AllOf(HasSubstr("a world of 3 ranks"), HasSubstr("WORLD_SIZE"))));
}

TEST(Loopback, IsThisMachineForEverybody) {
  for (const char* host : {"localhost", "127.0.0.1", "127.8.9.1", "::1"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"10.0.0.1", "0.0.0.0", "::", "worker-0", "127.0.0.1.example.com", ""}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

}  // namespace
}  // namespace ds::comm
