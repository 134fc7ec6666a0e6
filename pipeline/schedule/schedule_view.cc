#include "pipeline/schedule/schedule_view.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"
#include "pipeline/schedule/schedule_drawing.h"

namespace ds::pipeline {
namespace {

// More than anybody looks through; an action that is short beside the whole then has less than a column.
constexpr double kMostColumns = 100'000;
constexpr int kScaleCharacters = 10;  // at least, between two times of the scale

// Background and ink, from the 256 colours of terminals. Chunks take turns between two shades.
struct Shade {
  int background;
  int ink;
};

Shade shade_of(ActionKind kind, int chunk) {
  const bool light = chunk % 2 == 1;
  switch (kind) {
    case ActionKind::kBackward:
      return light ? Shade{114, 16} : Shade{28, 231};
    case ActionKind::kBackwardInput:
      return light ? Shade{116, 16} : Shade{30, 231};
    case ActionKind::kBackwardWeight:
      return light ? Shade{223, 16} : Shade{172, 16};
    default:
      return light ? Shade{111, 16} : Shade{25, 231};
  }
}

std::string painted(const std::string& text, const Shade& shade) {
  return cat("\x1b[48;5;", shade.background, ";38;5;", shade.ink, "m", text, "\x1b[0m");
}

std::string padded_left(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

std::string without_blanks(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::string percent(double share) { return cat(fixed(100 * share, 1), "%"); }

class TerminalDrawing {
 public:
  TerminalDrawing(const Schedule& schedule, const Timetable& timetable, int width, bool color)
      : schedule_(schedule),
        timetable_(timetable),
        color_(color),
        chunks_(chunk_of_stages(schedule)),
        unit_(std::max(column_time(timetable), timetable.makespan / kMostColumns)),
        columns_(unit_ > 0 ? static_cast<int>(std::lround(timetable.makespan / unit_)) : 0) {
    for (const std::vector<TimedAction>& list : timetable.ranks) {
      for (const TimedAction& timed : list) column_width_ = std::max(column_width_, label(timed.action).size());
    }
    if (names_stages()) ++column_width_;  // for the blank between "0F1" and "1F0"
    set_margins();
    const int room = width - static_cast<int>(margins_.front().size());
    band_ = std::max(1, room / static_cast<int>(column_width_));
  }

  std::string text() const {
    std::string text;
    int from = 0;
    do {
      text += cat(heading_, "\n");
      const int to = std::min(columns_, from + band_);
      for (size_t rank = 0; rank < timetable_.ranks.size(); ++rank) {
        text += cat(without_blanks(margins_[rank] + row(timetable_.ranks[rank], from, to)), "\n");
      }
      text += cat(scale(from, to), "\n\n");
      from = to;
    } while (from < columns_);
    return text + legend();
  }

 private:
  // A rank's number, the share of its time from first start to last end that is idle, and the activations it holds.
  void set_margins() {
    const std::vector<double> peaks = peak_activations(schedule_);
    std::vector<std::string> held;
    size_t held_width = 4;
    for (const double peak : peaks) {
      held.push_back(short_number(peak));
      held_width = std::max(held_width, held.back().size());
    }
    const size_t rank_width = std::max<size_t>(4, std::to_string(timetable_.ranks.size() - 1).size());
    heading_ = cat(padded_left("rank", rank_width), "  bubble  ", padded_left("held", held_width));
    for (size_t rank = 0; rank < timetable_.ranks.size(); ++rank) {
      const double span = timetable_.span(static_cast<int>(rank));
      const double bubble = span > 0 ? 1 - timetable_.busy(static_cast<int>(rank)) / span : 0;
      margins_.push_back(cat(padded_left(std::to_string(rank), rank_width), padded_left(percent(bubble), 8), "  ",
                             padded_left(held[rank], held_width), "  "));
    }
  }

  bool names_stages() const { return !color_ && schedule_.shape.chunks > 1; }

  std::string label(const Action& action) const {
    if (color_) return cat(" ", action.micro_batch);
    if (names_stages()) return to_text(action);
    return to_text(action).substr(std::to_string(action.stage).size());
  }

  int column_of(double time) const { return static_cast<int>(std::lround(time / unit_)); }

  std::string row(const std::vector<TimedAction>& list, int from, int to) const {
    std::string text;
    int column = from;
    const auto first = std::partition_point(list.begin(), list.end(),
                                            [&](const TimedAction& timed) { return column_of(timed.end) <= from; });
    for (auto timed = first; timed != list.end() && column < to; ++timed) {
      const int start = std::clamp(column_of(timed->start), column, to);
      const int end = std::clamp(column_of(timed->end), start, to);
      text += idle(start - column) + box(*timed, column_of(timed->start), start, end);
      column = end;
    }
    return text + idle(to - column);
  }

  std::string idle(int columns) const {
    std::string one = color_ ? std::string(column_width_ - 1, ' ') + "." : std::string(column_width_, '.');
    if (names_stages()) one.back() = ' ';
    std::string text;
    for (int i = 0; i < columns; ++i) text += one;
    return text;
  }

  // The part from `start` to `end` of an action that begins at `begin`, perhaps in an earlier band.
  std::string box(const TimedAction& timed, int begin, int start, int end) const {
    if (start == end) return "";
    std::string text = begin == start ? label(timed.action) : "";
    if (color_) text = padded_left(text, column_width_);
    text.resize(static_cast<size_t>(end - start) * column_width_, color_ ? ' ' : '-');
    if (names_stages() && end == column_of(timed.end)) text.back() = ' ';
    return color_ ? painted(text, shade_of(timed.action.kind, chunks_[timed.action.stage])) : text;
  }

  std::string scale(int from, int to) const {
    std::string line = "time";
    line.resize(margins_.front().size(), ' ');
    const int step = static_cast<int>(round_step(std::ceil(kScaleCharacters / static_cast<double>(column_width_))));
    for (int column = (from + step - 1) / step * step; column < to; column += step) {
      line.resize(margins_.front().size() + static_cast<size_t>(column - from) * column_width_, ' ');
      const std::string time = short_number(column * unit_);
      // The last one may not fit.
      if ((column - from) * column_width_ + time.size() <= (to - from) * column_width_) line += time;
    }
    return without_blanks(line);
  }

  std::string legend() const {
    std::string text;
    for (const LegendEntry& entry : legend_of(timetable_)) {
      if (!color_) {
        text += cat(entry.letter, " ");
      } else {
        for (int chunk = 0; chunk < std::min(2, schedule_.shape.chunks); ++chunk) {
          text += painted("  ", shade_of(entry.kind, chunk));
        }
        text += " ";
      }
      text += cat(entry.words, "   ");
    }
    text += cat(". idle   a column is ", short_number(unit_), "\n");
    if (color_ && schedule_.shape.chunks > 1)
      text += "numbers are micro-batches; chunks take turns between two shades\n";
    if (color_ && schedule_.shape.chunks == 1) text += "numbers are micro-batches\n";
    if (!color_ && schedule_.shape.chunks > 1) text += "0F1: stage 0, forward, micro-batch 1\n";
    if (!color_ && schedule_.shape.chunks == 1) text += "F1: forward, micro-batch 1\n";
    return text + "bubble: idle share from a rank's first start to its last end; held: most activations at once\n";
  }

  const Schedule& schedule_;
  const Timetable& timetable_;
  bool color_;
  std::vector<int> chunks_;
  double unit_;
  int columns_;
  size_t column_width_ = 1;
  std::string heading_;
  std::vector<std::string> margins_;
  int band_ = 1;
};

}  // namespace

std::string headline(const Schedule& schedule) {
  const auto counted = [](int number, const char* what) { return cat(number, " ", what, number == 1 ? "" : "s"); };
  const std::string stages = counted(schedule.shape.chunks, "stage");
  return cat(schedule.name, ": ", counted(schedule.shape.ranks, "rank"), ", ", stages, " a rank, ",
             schedule.shape.micro_batches, schedule.shape.micro_batches == 1 ? " micro-batch" : " micro-batches");
}

std::string to_terminal(const Schedule& schedule, const Timetable& timetable, int width, bool color) {
  return TerminalDrawing(schedule, timetable, width, color).text();
}

}  // namespace ds::pipeline
