// Words of command lines as shells write them. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

// Quotes `text` so that it is one word for a POSIX shell, csh or fish.
std::string shell_word(std::string_view text);

// Splits a text into words as a shell does: blanks, '...', "..." and backslashes; nothing is expanded. Throws
// ConfigError for a quote without end.
std::vector<std::string> split_words(std::string_view text);

}  // namespace ds::launcher
