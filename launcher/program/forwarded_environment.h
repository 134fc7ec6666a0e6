// The environment variables that ranks on other hosts get from here.
//
// ssh starts programs with the environment that the host's login gives. Set over it are the variables of
// this process that is_forwarded() names, and over those the entries of .deepspeed_env files.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// Whether a variable of this process is passed on: those of communication libraries, thread counts, CUDA and LibTorch,
// PATH and LD_LIBRARY_PATH are, never one that differs by host or rank (CUDA_VISIBLE_DEVICES, DS_LAUNCH_ID,
// DS_RESTART_FILE). Pure.
bool is_forwarded(std::string_view name);

// Parses lines "NAME=value" of a .deepspeed_env file; "#" at the start of a line makes it a comment. Throws ConfigError
// naming `file` and the line for others. Pure.
std::vector<std::string> parse_environment_file(std::string_view text, const std::string& file);

// The forwarded variables of `environment`, then the entries of the .deepspeed_env files in `home` and `here`; a later
// entry wins. DS_ENV_FILE in `environment` is another name for them, or an absolute path. Throws IoError when
// DS_ENV_FILE is set and there is no such file.
std::vector<std::string> forwarded_environment(const std::vector<std::string>& environment,
                                               const std::filesystem::path& home, const std::filesystem::path& here);

// `base` with `entries` set, in order.
std::vector<std::string> with_entries(std::vector<std::string> base, const std::vector<std::string>& entries);

}  // namespace ds::launcher
