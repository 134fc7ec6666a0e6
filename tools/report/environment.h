// The environment variables that change what a job does.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/report/section.h"

namespace ds::tool::report {

// Whether the variable is one of them: those of dsengine, of the launcher, and of the libraries below. Pure.
bool changes_behaviour(std::string_view name);

// The names and values of the entries that change behaviour, among entries "NAME=value", sorted by name. A value whose
// name says that it is a secret (a token, a key, a password) is replaced. Pure.
std::vector<std::pair<std::string, std::string>> telling_variables(const std::vector<std::string>& environment);

// The environment of this process, as "NAME=value".
std::vector<std::string> own_environment();

Section describe(const std::vector<std::pair<std::string, std::string>>& variables);

}  // namespace ds::tool::report
