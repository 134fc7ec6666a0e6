// Processes that come to the store of a job without its secret. Keys of the job begin with a prefix that only its own
// processes know (core/job_secret.h), so that what a stranger writes lies outside, and is nobody's rank.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace ds::comm {

// `outside`: the store without the job's prefix. All throw what the store throws.
//
// Rank 0 says whether the job has a secret, before anything else.
void say_whether_there_is_a_secret(c10d::Store& outside, bool there_is);
// Another rank, without a secret, leaves its place (arrival_text()), and learns whether the job has one. Waits so long
// for rank 0 to say it.
bool come_without_secret(c10d::Store& outside, const std::string& arrival, std::chrono::milliseconds limit);
// What such a rank wrote: "rank at ADDRESS (host7, pid 4711)"; empty where none came. It is forgotten.
std::string take_stranger(c10d::Store& outside);

}  // namespace ds::comm
