#include "progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check.h"

namespace gpt {
namespace {

constexpr auto kTerminalPeriod = std::chrono::milliseconds(100);
constexpr auto kPlainPeriod = std::chrono::seconds(5);
constexpr int64_t kMinBarWidth = 5;
constexpr int64_t kMaxBarWidth = 40;
constexpr double kSmoothing = 0.1;  // share of the newest step in the moving averages

// 83 -> "1:23", 3723 -> "1:02:03"
std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  char text[32];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02d:%02d", static_cast<long long>(whole / 3600),
                  static_cast<int>(whole / 60 % 60), static_cast<int>(whole % 60));
  } else {
    std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(whole / 60), static_cast<int>(whole % 60));
  }
  return text;
}

// 12345 -> "12,345"
std::string grouped(double value) {
  const std::string digits = std::to_string(std::llround(value));
  std::string result;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) result += ',';
    result += digits[i];
  }
  return result;
}

}  // namespace

ProgressBar::ProgressBar(int64_t total_steps, int columns) : total_steps_(total_steps), columns_(columns) {}

void ProgressBar::show(int64_t step, double loss, double step_seconds, int64_t tokens) {
  // The first step warms caches and threads up; it says nothing about those that follow.
  const double share = ++steps_shown_ <= 2 ? 1.0 : kSmoothing;
  seconds_per_step_ += share * (step_seconds - seconds_per_step_);
  tokens_per_second_ = static_cast<double>(tokens) / seconds_per_step_;
  const auto now = Clock::now();
  const auto period =
      columns_ > 0 ? std::chrono::duration_cast<Clock::duration>(kTerminalPeriod) : Clock::duration(kPlainPeriod);
  if (steps_shown_ > 1 && step < total_steps_ && now - last_shown_ < period) return;
  last_shown_ = now;
  // A redraw returns to the line's start and clears what the longer line before left.
  std::fputs(cat(columns_ > 0 ? "\r" : "", text(step, loss), columns_ > 0 ? "\x1b[K" : "\n").c_str(), stdout);
  std::fflush(stdout);
  line_open_ = columns_ > 0;
}

void ProgressBar::finish() {
  if (line_open_) std::fputs("\n", stdout);
  line_open_ = false;
  std::fflush(stdout);
}

std::string ProgressBar::text(int64_t step, double loss) const {
  char loss_text[32];
  std::snprintf(loss_text, sizeof loss_text, "%.3f", loss);
  const std::string place = cat("step ", step, "/", total_steps_, "  ");
  const std::string figures = cat("loss ", loss_text, "  ", grouped(tokens_per_second_), " tokens/s  ",
                                  duration(static_cast<double>(total_steps_ - step) * seconds_per_step_), " left");
  // The bar takes what the terminal leaves; a line that wraps could not be redrawn.
  const int64_t width =
      std::min<int64_t>(kMaxBarWidth, columns_ - 1 - static_cast<int64_t>(place.size() + figures.size()) - 4);
  if (width < kMinBarWidth) {
    const std::string line = place + figures;
    return columns_ > 0 ? line.substr(0, static_cast<size_t>(columns_ - 1)) : line;
  }
  const auto done = static_cast<size_t>(width * step / total_steps_);
  return cat(place, '[', std::string(done, '#'), std::string(static_cast<size_t>(width) - done, '.'), "]  ", figures);
}

int terminal_columns() {
  winsize size{};
  if (isatty(STDOUT_FILENO) != 1) return 0;
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace gpt
