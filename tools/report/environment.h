// The environment variables that change what a job does.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/report/section.h"

namespace ds::tool::report {

// Does it? Those of dsengine, of the launcher, and of the libraries below. Pure.
bool changes_behaviour(std::string_view name);

// The names and values of such entries of "NAME=value", sorted by name. A value whose name says that it is a secret
// (a token, a key, a password) is replaced. Pure.
std::vector<std::pair<std::string, std::string>> telling_variables(const std::vector<std::string>& environment);

std::vector<std::string> own_environment();

Section describe(const std::vector<std::pair<std::string, std::string>>& variables);

}  // namespace ds::tool::report
