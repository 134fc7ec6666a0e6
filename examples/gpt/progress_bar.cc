#include "examples/gpt/progress_bar.h"

#include <cmath>
#include <cstdio>

#include "core/text.h"

namespace gpt {
namespace {

constexpr auto kTerminalPeriod = std::chrono::milliseconds(100);
constexpr auto kPlainPeriod = std::chrono::seconds(5);
constexpr int kBarWidth = 24;
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

ProgressBar::ProgressBar(int64_t total_steps, bool on_terminal)
    : total_steps_(total_steps), on_terminal_(on_terminal) {}

void ProgressBar::show(int64_t step, double loss, double step_seconds, int64_t tokens) {
  // The first step warms caches and threads up; it says nothing about those that follow.
  const double share = step <= 2 ? 1.0 : kSmoothing;
  seconds_per_step_ += share * (step_seconds - seconds_per_step_);
  tokens_per_second_ = static_cast<double>(tokens) / seconds_per_step_;
  const auto now = Clock::now();
  const auto period =
      on_terminal_ ? std::chrono::duration_cast<Clock::duration>(kTerminalPeriod) : Clock::duration(kPlainPeriod);
  if (step > 1 && step < total_steps_ && now - last_shown_ < period) return;
  last_shown_ = now;
  // A redraw returns to the line's start and clears what the longer line before left.
  std::fputs(ds::cat(on_terminal_ ? "\r" : "", text(step, loss), on_terminal_ ? "\x1b[K" : "\n").c_str(), stdout);
  std::fflush(stdout);
  line_open_ = on_terminal_;
}

void ProgressBar::finish() {
  if (line_open_) std::fputs("\n", stdout);
  line_open_ = false;
  std::fflush(stdout);
}

std::string ProgressBar::text(int64_t step, double loss) const {
  std::string bar;
  if (on_terminal_) {
    const auto done = static_cast<size_t>(kBarWidth * step / total_steps_);
    bar = ds::cat('[', std::string(done, '#'), std::string(kBarWidth - done, '.'), "]  ");
  }
  char loss_text[32];
  std::snprintf(loss_text, sizeof loss_text, "%.3f", loss);
  return ds::cat("step ", step, "/", total_steps_, "  ", bar, "loss ", loss_text, "  ", grouped(tokens_per_second_),
                 " tokens/s  ", duration(static_cast<double>(total_steps_ - step) * seconds_per_step_), " left");
}

}  // namespace gpt
