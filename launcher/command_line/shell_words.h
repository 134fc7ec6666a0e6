// Words of command lines as shells write them. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// `text` as one word of a POSIX shell, csh or fish.
std::string shell_word(std::string_view text);

// Words as a shell splits them: blanks, '...', "..." and backslashes; nothing is expanded. Throws ConfigError for a
// quote without end.
std::vector<std::string> split_words(std::string_view text);

}  // namespace ds::launcher
