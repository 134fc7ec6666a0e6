// Cuts a rank's output into lines. Pure.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace ds::launcher {

// Longer lines are cut there, so that a program that never ends a line cannot fill the memory.
inline constexpr size_t kLongestLine = 1 << 20;

// Collects bytes and gives out whole lines, without their end. A line that was redrawn with carriage returns is given
// as last drawn: "10 %\r20 %\n" is "20 %".
class LineReader {
 public:
  using Take = std::function<void(std::string_view line)>;

  void feed(std::string_view bytes, const Take& take);
  void finish(const Take& take);  // gives out the line that has no end yet

 private:
  std::string line_;
};

// The last lines of a rank, for the report of its failure. Frames of stacks are left out: they follow the line that
// they belong to, and would drive it out.
class LastLines {
 public:
  static constexpr size_t kCount = 20;
  static constexpr size_t kLongest = 2000;  // bytes kept of each

  void add(std::string_view line);
  const std::deque<std::string>& lines() const { return lines_; }
  // The number of frames that were left out after these lines, and before the first line of all.
  size_t frames() const;

 private:
  std::deque<std::string> lines_;
  std::deque<size_t> frames_;  // after each line
  size_t frames_before_ = 0;   // the first line of all
};

}  // namespace ds::launcher
