#include "core/secret/job_secret.h"

#include <sys/random.h>

#include <cerrno>
#include <utility>

#include "core/check.h"
#include "core/secret/sha256.h"
#include "core/system_call.h"

namespace ds {
namespace {

constexpr size_t kShortest = 16;
constexpr size_t kPrefixDigits = 32;

}  // namespace

std::string new_job_secret() {
  Sha256Digest random{};
  for (size_t have = 0; have < random.size();) {
    const ssize_t got = getrandom(random.data() + have, random.size() - have, 0);
    if (got < 0 && errno == EINTR) continue;
    require_system<IoError>(got > 0, "random numbers for the job's secret");
    have += static_cast<size_t>(got);
  }
  return to_hex_text(random);
}

JobSecret::JobSecret(std::string secret) : secret_(std::move(secret)) {
  require<ConfigError>(secret_.size() >= kShortest, "environment variable ", kJobSecretVariable, ": expected at least ",
                       kShortest, " characters that nobody can guess, found ", secret_.size(),
                       "; `openssl rand -hex 32` makes some");
}

std::optional<JobSecret> JobSecret::from_environment(
    const std::function<std::optional<std::string>(const char* name)>& variable) {
  auto secret = variable(kJobSecretVariable);
  if (!secret || secret->empty()) return std::nullopt;
  return JobSecret(*std::move(secret));
}

std::string JobSecret::key_prefix() const {
  return "job-" + to_hex_text(hmac_sha256(secret_, "dsengine: keys of a store")).substr(0, kPrefixDigits);
}

std::string JobSecret::proof_of(std::string_view purpose, std::string_view message) const {
  // The length keeps one purpose's messages from being taken for another's.
  return to_hex_text(hmac_sha256(secret_, cat("dsengine: proof: ", purpose.size(), ':', purpose, message)));
}

bool JobSecret::proves(std::string_view proof, std::string_view purpose, std::string_view message) const {
  return equal_in_constant_time(proof, proof_of(purpose, message));
}

}  // namespace ds
