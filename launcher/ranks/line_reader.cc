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

// "frame #12: c10::Error::Error(...) + 0x9c (0x7f... in libc10.so)", as LibTorch writes it.
bool is_stack_frame(std::string_view line) {
  constexpr std::string_view kFrame = "frame #";
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  return line.starts_with(kFrame) && line.size() > kFrame.size() && line[kFrame.size()] >= '0' &&
         line[kFrame.size()] <= '9';
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
    if (!frames_.empty()) ++frames_.back();
    return;
  }
  if (lines_.size() == kCount) {
    lines_.pop_front();
    frames_.pop_front();
  }
  lines_.emplace_back(line.substr(0, kLongest));
  frames_.push_back(0);
}

size_t LastLines::frames() const { return std::accumulate(frames_.begin(), frames_.end(), size_t{0}); }

}  // namespace ds::launcher
