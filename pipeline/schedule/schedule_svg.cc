// to_svg().
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"
#include "pipeline/schedule/schedule_drawing.h"
#include "pipeline/schedule/schedule_view.h"

namespace ds::pipeline {
namespace {

// All in pixels.
constexpr double kShortestBox = 24;  // where the drawing does not get too wide
constexpr double kMostWidth = 12'000;
constexpr double kLeft = 64;  // room for "rank 12"
constexpr double kRight = 16;
constexpr double kRowHeight = 26;
constexpr double kBoxHeight = 22;
constexpr double kTitleHeight = 30;
constexpr double kAxisHeight = 28;
constexpr double kLegendHeight = 30;
constexpr double kLegendEntryWidth = 190;
constexpr double kDigitWidth = 7;
constexpr double kTickDistance = 80;

constexpr const char* kStyle = R"(<style>
text { font: 11px sans-serif; fill: #202020; }
.title { font-weight: bold; font-size: 13px; }
.number { text-anchor: middle; }
rect { stroke: #ffffff; stroke-width: 0.5; }
.idle { fill: #f0f0f0; }
.tick { stroke: #b0b0b0; }
.F0 { fill: #7ea6e0; } .F1 { fill: #bcd2f2; }
.B0 { fill: #82c07e; } .B1 { fill: #bfe3bc; }
.I0 { fill: #6cc5c1; } .I1 { fill: #b3e3e1; }
.W0 { fill: #f0b060; } .W1 { fill: #f8d8ae; }
</style>
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        // XML 1.0 allows no other control characters.
        out += static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\t' ? '?' : c;
    }
  }
  return out;
}

// Two digits after the point at most.
std::string pixels(double value) { return short_number(std::round(value * 100) / 100); }

const char* letter_of(ActionKind kind) {
  for (const LegendEntry& entry : kLegend) {
    if (entry.kind == kind) return entry.letter;
  }
  return "?";
}

class SvgDrawing {
 public:
  SvgDrawing(const Schedule& schedule, const Timetable& plan, const Timetable* measured)
      : schedule_(schedule), plan_(plan), measured_(measured), chunks_(chunk_of_stages(schedule)) {
    longest_ = std::max(plan.makespan, measured != nullptr ? measured->makespan : 0);
    const double shortest = shortest_action(plan);
    if (shortest > 0) scale_ = kShortestBox / shortest;
    if (longest_ * scale_ > kMostWidth) scale_ = kMostWidth / longest_;
  }

  std::string text() {
    const std::string title = headline(schedule_);
    add_text(kLeft, kTitleHeight - 10, "title", title);
    top_ = kTitleHeight;
    add_timetable(measured_ != nullptr ? "planned" : "", plan_);
    if (measured_ != nullptr) add_timetable("measured", *measured_);
    add_legend();
    const double width =
        std::max(kLeft + longest_ * scale_ + kRight, kLeft + legend_of(plan_).size() * kLegendEntryWidth);
    const std::string size = cat("width=\"", pixels(width), "\" height=\"", pixels(top_), "\"");
    return cat("<svg xmlns=\"http://www.w3.org/2000/svg\" ", size, " viewBox=\"0 0 ", pixels(width), " ", pixels(top_),
               "\">\n<title>", escaped(title), "</title>\n", kStyle, body_, "</svg>\n");
  }

 private:
  double x_of(double time) const { return kLeft + time * scale_; }

  void add_text(double x, double y, const char* name, const std::string& text) {
    body_ += cat("<text x=\"", pixels(x), "\" y=\"", pixels(y), "\"", *name != '\0' ? cat(" class=\"", name, "\"") : "",
                 ">", escaped(text), "</text>\n");
  }

  void add_box(double x, double y, double width, const std::string& name, const std::string& tooltip) {
    const std::string rect = cat("<rect x=\"", pixels(x), "\" y=\"", pixels(y), "\" width=\"", pixels(width),
                                 "\" height=\"", pixels(kBoxHeight), "\" class=\"", name, "\"");
    body_ += tooltip.empty() ? cat(rect, "/>\n") : cat(rect, "><title>", escaped(tooltip), "</title></rect>\n");
  }

  void add_timetable(const std::string& name, const Timetable& table) {
    add_text(kLeft, top_ + 12, "",
             cat(name, name.empty() ? "" : ": ", "bubble ", fixed(100 * table.bubble(), 1), "%, idle ",
                 fixed(100 * table.idle(), 1), "%, ", short_number(table.makespan), " in all"));
    top_ += 20;
    for (size_t rank = 0; rank < table.ranks.size(); ++rank) {
      add_text(8, top_ + 15, "", cat("rank ", rank));
      add_box(kLeft, top_, table.makespan * scale_, "idle", "");
      for (const TimedAction& timed : table.ranks[rank]) add_action(timed);
      top_ += kRowHeight;
    }
    add_axis(table);
  }

  void add_action(const TimedAction& timed) {
    const double width = (timed.end - timed.start) * scale_;
    const std::string name = cat(letter_of(timed.action.kind), chunks_[timed.action.stage] % 2);
    add_box(x_of(timed.start), top_, width, name,
            cat(to_text(timed.action), ": ", short_number(timed.start), " to ", short_number(timed.end)));
    const std::string number = std::to_string(timed.action.micro_batch);
    if (static_cast<double>(number.size()) * kDigitWidth + 2 > width) return;
    add_text(x_of(timed.start) + width / 2, top_ + 15, "number", number);
  }

  void add_axis(const Timetable& table) {
    if (table.makespan > 0) {
      const double step = round_step(kTickDistance / scale_);
      for (int i = 0; i * step <= table.makespan; ++i) {
        const std::string x = pixels(x_of(i * step));
        body_ += cat("<line x1=\"", x, "\" y1=\"", pixels(top_), "\" x2=\"", x, "\" y2=\"", pixels(top_ + 5),
                     "\" class=\"tick\"/>\n");
        add_text(x_of(i * step), top_ + 17, "number", short_number(i * step));
      }
    }
    top_ += kAxisHeight;
  }

  void add_legend() {
    double x = kLeft;
    for (const LegendEntry& entry : legend_of(plan_)) {
      const int shades = std::min(2, schedule_.shape.chunks);
      for (int shade = 0; shade < shades; ++shade) {
        add_box(x + shade * 14, top_, 12, cat(entry.letter, shade),
                shades > 1 ? "chunks take turns between two shades" : "");
      }
      add_text(x + shades * 14 + 4, top_ + 15, "", entry.words);
      x += kLegendEntryWidth;
    }
    top_ += kLegendHeight;
  }

  const Schedule& schedule_;
  const Timetable& plan_;
  const Timetable* measured_;
  std::vector<int> chunks_;
  double longest_ = 0;
  double scale_ = 1;  // pixels for a unit of time
  double top_ = 0;    // where the next thing goes
  std::string body_;
};

}  // namespace

std::string to_svg(const Schedule& schedule, const Timetable& timetable, const Timetable* measured) {
  return SvgDrawing(schedule, timetable, measured).text();
}

}  // namespace ds::pipeline
