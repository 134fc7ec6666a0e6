// The secret of a job: what its processes know and nobody else. ds-launch makes one for each start and hands it to the
// ranks in their environment, to other hosts through ssh's standard input, never on a command line. Torch-free.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace ds {

inline constexpr const char* kJobSecretVariable = "DS_JOB_SECRET";

// Makes a secret: 64 hexadecimal digits from the kernel. Throws IoError where it gives none.
std::string new_job_secret();

// A secret with the keys and proofs made from it, so that it is never shown or sent itself. A copy costs nothing but
// its text.
class JobSecret {
 public:
  // Throws ConfigError, which does not show it, for one that can be guessed: fewer than 16 characters.
  explicit JobSecret(std::string secret);
  // The secret in DS_JOB_SECRET; nothing where it is not set or empty.
  static std::optional<JobSecret> from_environment(
      const std::function<std::optional<std::string>(const char* name)>& variable);

  // The beginning of the keys that the job has in a store: another one for each secret.
  std::string key_prefix() const;
  // A proof that the writer of `message`, for that purpose, has the secret.
  std::string proof_of(std::string_view purpose, std::string_view message) const;
  bool proves(std::string_view proof, std::string_view purpose, std::string_view message) const;

 private:
  std::string secret_;
};

}  // namespace ds
