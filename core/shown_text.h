// Text from elsewhere (a file, the command line, another process), made fit for a message: a terminal obeys control
// bytes, and a line of a megabyte hides what is said about it. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ds {

inline constexpr size_t kShownBytes = 120;       // the most of one thing that a message names
inline constexpr size_t kShownLineBytes = 4000;  // the most of a line of a message
inline constexpr size_t kShownMessageBytes = 64 << 10;

// Returns `text` with control characters and what is no UTF-8 as \n, \t or \xNN. More than `most` bytes of it are cut,
// at a character: "abc...".
std::string shown_text(std::string_view text, size_t most = kShownBytes);

// Returns a full message, whose line ends and tabs stay: each line as shown_text() has it, cut after kShownLineBytes,
// and the message after kShownMessageBytes. Programs print what others have thrown through it.
std::string shown_message(std::string_view message);

}  // namespace ds
