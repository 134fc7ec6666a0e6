// What ds-launch and the ranks agree on about flight records (comm/flight_folder.h): those of a job lie in the folder
// $DS_FLIGHT_FOLDER/$DS_FLIGHT_JOB, without DS_FLIGHT_FOLDER in dsengine-UID/$DS_FLIGHT_JOB of the temporary folder.
#pragma once

namespace ds {

inline constexpr const char* kFlightFolderVariable = "DS_FLIGHT_FOLDER";
inline constexpr const char* kFlightJobVariable = "DS_FLIGHT_JOB";
inline constexpr const char* kFlightFolderPrefix = "dsengine-";  // then the user's id

}  // namespace ds
