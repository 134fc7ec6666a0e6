#include "launcher/ranks/line_reader.h"

#include <algorithm>
#include <numeric>

namespace ds::launcher {
namespace {

std::string_view last_drawing(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const size_t redraw = line.rfind('\r');
  return redraw == std::string_view::npos ? line : line.substr(redraw + 1);
}

// Takes `prefix` away from the front.
bool skip(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

bool skip_digits(std::string_view& text, std::string_view digits) {
  const size_t count = std::min(text.find_first_not_of(digits), text.size());
  text.remove_prefix(count);
  return count > 0;
}

// LibTorch's whole form, "frame #12: c10::Error::Error(...) + 0x9c (0x7f... in /lib/libc10.so)", with "<unknown
// function>" in the place of a name. A program may well have lines of its own about frames.
bool is_stack_frame(std::string_view line) {
  constexpr std::string_view kHex = "0123456789abcdef";
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  if (!skip(line, "frame #") || !skip_digits(line, "0123456789") || !skip(line, ": ")) return false;
  const size_t offset = line.rfind(" + 0x");
  if (offset == std::string_view::npos || offset == 0 || !line.ends_with(')')) return false;
  line.remove_prefix(offset);
  return skip(line, " + 0x") && skip_digits(line, kHex) && skip(line, " (0x") && skip_digits(line, kHex) &&
         skip(line, " in ");
}

}  // namespace

void LineReader::feed(std::string_view bytes, const Take& take) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    const size_t room = kLongestLine - line_.size();
    const size_t length = std::min({end, bytes.size(), room});
    line_.append(bytes.substr(0, length));
    bytes.remove_prefix(length);
    const bool ended = !bytes.empty() && bytes.front() == '\n';
    if (ended) bytes.remove_prefix(1);
    if (ended || line_.size() >= kLongestLine) {
      take(last_drawing(line_));
      line_.clear();
    }
  }
  if (const size_t redraw = line_.rfind('\r'); redraw != std::string::npos && redraw + 1 < line_.size()) {
    line_.erase(0, redraw + 1);  // a progress bar may go on for days without a line end
  }
}

void LineReader::finish(const Take& take) {
  if (!line_.empty()) take(last_drawing(line_));
  line_.clear();
}

void LastLines::add(std::string_view line) {
  if (is_stack_frame(line)) {
    ++(frames_.empty() ? frames_before_ : frames_.back());
    return;
  }
  if (lines_.size() == kCount) {
    lines_.pop_front();
    frames_.pop_front();
    frames_before_ = 0;
  }
  lines_.emplace_back(line.substr(0, kLongest));
  frames_.push_back(0);
}

size_t LastLines::frames() const { return std::accumulate(frames_.begin(), frames_.end(), frames_before_); }

}  // namespace ds::launcher
