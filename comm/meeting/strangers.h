// Processes that come to the store of a job without its secret. Keys of the job begin with what is derived from the
// secret (core/secret/job_secret.h), so that what a stranger writes lies outside, and is nobody's rank.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

#include "core/secret/job_secret.h"

namespace ds::comm {

// `outside`: the store without the job's prefix, of the calling thread alone. Who takes keys away while they are read
// makes that take a second. All throw what the store throws.
//
// Rank 0 says which secret the job has, in a way that only who has it too understands, before anything else.
void say_which_secret(c10d::Store& outside, const std::optional<JobSecret>& own);

// The secret that rank 0 has, as another rank sees it.
enum class SecretOfFirst {
  kUnsaid,
  kSame,  // or both have none
  kNone,
  kAnother,
};
// Returns which secret rank 0 has; waits at most `limit` for rank 0 to say it.
SecretOfFirst secret_of_first(c10d::Store& outside, const std::optional<JobSecret>& own,
                              std::chrono::milliseconds limit);

// Leaves the place (arrival_text()) of a rank that does not come in.
void leave_place(c10d::Store& outside, const std::string& arrival);
// Returns, once, what such a rank has left: "ADDRESS (host7, pid 4711)"; empty where none came.
std::string take_stranger(c10d::Store& outside);

}  // namespace ds::comm
