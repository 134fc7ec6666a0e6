// The line that shows how far a run is.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace gpt {

// Redraws one line on a terminal; elsewhere prints a plain line at the first step, every five seconds and at the last
// step. Not thread safe.
class ProgressBar {
 public:
  // `columns` of the terminal, which the line is made to fit; 0: no terminal.
  ProgressBar(int64_t total_steps, int columns);

  // After step `step` (from 1); `tokens` in it over all ranks.
  void show(int64_t step, double loss, double step_seconds, int64_t tokens);
  // Ends the line, so that other output starts on one of its own.
  void finish();

 private:
  std::string text(int64_t step, double loss) const;

  using Clock = std::chrono::steady_clock;
  int64_t total_steps_;
  int columns_;
  bool line_open_ = false;
  int64_t steps_shown_ = 0;
  double seconds_per_step_ = 0;  // moving average
  double tokens_per_second_ = 0;
  Clock::time_point last_shown_;
};

// Columns of the terminal that standard output is; 0 when it is none.
int terminal_columns();

}  // namespace gpt
