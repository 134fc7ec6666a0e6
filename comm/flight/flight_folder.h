// Where flight records lie.
#pragma once

#include <string>

namespace ds::comm {

// Makes BASE/JOB (`base` empty: that of core/flight_job.h) for this user alone, and removes folders of other jobs that
// hold nothing but records older than a week that nobody writes to. Returns it, or an empty text after a warning when
// it cannot be made.
std::string make_flight_folder(const std::string& base, const std::string& job);

std::string flight_file(const std::string& folder, int rank);
// Of any rank, or of a stall.
bool holds_records(const std::string& folder);
bool is_stall_folder(const std::string& folder);
// In a job's folder: for the records of its so many-th stall, and in that one, what they say.
std::string stall_folder(const std::string& folder, int stall);
std::string stall_summary(const std::string& folder);

}  // namespace ds::comm
