#include "tools/bench/bench_output.h"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>

#include "core/text.h"
#include "tools/bench/trial.h"

namespace ds::tool::bench {
namespace {

using nlohmann::ordered_json;

constexpr int kSizeWidth = 12;
constexpr int kWordWidth = 9;
constexpr int kTimeWidth = 11;
constexpr int kBandwidthWidth = 9;
constexpr int kWrongWidth = 7;
constexpr int kBlockWidth = kTimeWidth + 2 * kBandwidthWidth + kWrongWidth;

std::string right(const std::string& text, int width) {
  const int missing = std::max(0, width - static_cast<int>(text.size()));
  return std::string(static_cast<size_t>(missing), ' ') + text;
}

std::string cells(const std::string& time, const std::string& algbw, const std::string& busbw,
                  const std::string& wrong) {
  return right(time, kTimeWidth) + right(algbw, kBandwidthWidth) + right(busbw, kBandwidthWidth) +
         right(wrong, kWrongWidth);
}

std::string cells(const std::optional<Measurement>& measured, Operation operation) {
  if (!measured) return cells("-", "-", "-", "-");
  const std::string time = fixed(measured->microseconds, 2);
  if (operation == Operation::kBarrier) return cells(time, "-", "-", "-");
  return cells(time, fixed(measured->algbw, 2), fixed(measured->busbw, 2),
               measured->wrong ? cat(*measured->wrong) : "N/A");
}

std::vector<const Measurement*> measurements(const Row& row) {
  std::vector<const Measurement*> found;
  for (const auto* measured : {&row.out_of_place, &row.in_place}) {
    if (*measured) found.push_back(&**measured);
  }
  return found;
}

bool was_checked(const std::vector<Row>& rows) {
  return std::any_of(rows.begin(), rows.end(), [](const Row& row) {
    const auto found = measurements(row);
    return std::any_of(found.begin(), found.end(), [](const Measurement* one) { return one->wrong.has_value(); });
  });
}

std::vector<Operation> operations_of(const std::vector<Row>& rows) {
  std::vector<Operation> operations;
  for (const Row& row : rows) {
    if (std::find(operations.begin(), operations.end(), row.operation) == operations.end()) {
      operations.push_back(row.operation);
    }
  }
  return operations;
}

bool has_root(Operation operation) { return operation == Operation::kBroadcast || operation == Operation::kReduce; }

ordered_json to_json(const Row& row, const Measurement& measured, bool in_place) {
  ordered_json result = {{"operation", name_of(row.operation)},
                         {"bytes", row.amount.bytes},
                         {"count", row.amount.count},
                         {"in_place", in_place},
                         {"time_us", measured.microseconds}};
  if (row.operation == Operation::kBarrier) return result;
  result["algbw"] = measured.algbw;
  result["busbw"] = measured.busbw;
  result["wrong"] = measured.wrong ? ordered_json(*measured.wrong) : ordered_json();
  return result;
}

}  // namespace

void print_setting(const BenchSetting& setting, std::ostream& out) {
  out << "# ds-tool bench " << setting.version << ", " << setting.ranks.size()
      << (setting.ranks.size() == 1 ? " rank" : " ranks") << " on " << setting.device << "; backend " << setting.choice
      << '\n';
  out << "# time: mean of " << setting.iterations << " calls after " << setting.warmup
      << ", and of the ranks; bandwidths: 10^9 bytes a second; #wrong: elements of all ranks\n";
  for (size_t rank = 0; rank < setting.ranks.size(); ++rank) {
    out << "#   rank " << rank << ": " << setting.ranks[rank] << '\n';
  }
}

void print_heading(Operation operation, std::ostream& out) {
  out << "#\n# " << name_of(operation) << '\n';
  const std::string start = right("", 2 * kSizeWidth + 3 * kWordWidth - 1);
  const auto block = [](const std::string& title) {
    const int left = (kBlockWidth + static_cast<int>(title.size())) / 2;
    return right(title, left) + std::string(static_cast<size_t>(kBlockWidth - left), ' ');
  };
  const std::string units = cells("(us)", "(GB/s)", "(GB/s)", "");
  out << "#" << start << block("out-of-place") << block("in-place") << '\n'
      << "#" << right("size", kSizeWidth - 1) << right("count", kSizeWidth) << right("type", kWordWidth)
      << right("redop", kWordWidth) << right("root", kWordWidth) << cells("time", "algbw", "busbw", "#wrong")
      << cells("time", "algbw", "busbw", "#wrong") << '\n'
      << "#" << right("(B)", kSizeWidth - 1) << right("(elements)", kSizeWidth) << right("", 3 * kWordWidth) << units
      << units << std::endl;
}

void print_row(const Row& row, const BenchSetting& setting, std::ostream& out) {
  out << right(cat(row.amount.bytes), kSizeWidth) << right(cat(row.amount.count), kSizeWidth)
      << right(setting.dtype, kWordWidth) << right(is_reduction(row.operation) ? setting.redop : "none", kWordWidth)
      << right(has_root(row.operation) ? cat(setting.root) : "-1", kWordWidth) << cells(row.out_of_place, row.operation)
      << cells(row.in_place, row.operation) << std::endl;
}

double mean_busbw(const std::vector<Row>& rows, Operation operation) {
  double sum = 0;
  int count = 0;
  for (const Row& row : rows) {
    if (row.operation != operation) continue;
    for (const Measurement* measured : measurements(row)) {
      sum += measured->busbw;
      ++count;
    }
  }
  return count == 0 ? 0 : sum / count;
}

int64_t total_wrong(const std::vector<Row>& rows) {
  int64_t wrong = 0;
  for (const Row& row : rows) {
    for (const Measurement* measured : measurements(row)) wrong += measured->wrong.value_or(0);
  }
  return wrong;
}

int exit_code_of(const std::vector<Row>& rows) { return total_wrong(rows) == 0 ? 0 : 1; }

void print_summary(const std::vector<Row>& rows, std::ostream& out) {
  out << "#\n";
  for (const Operation operation : operations_of(rows)) {
    if (operation == Operation::kBarrier) continue;
    out << "# Avg bus bandwidth of " << name_of(operation) << ": " << fixed(mean_busbw(rows, operation), 3) << '\n';
  }
  const int64_t wrong = total_wrong(rows);
  const std::string verdict = was_checked(rows) ? cat(wrong, wrong == 0 ? " OK" : " FAILED") : "not looked for";
  out << "# Wrong elements: " << verdict << std::endl;
}

void print_json(const BenchSetting& setting, const std::vector<Row>& rows, std::ostream& out) {
  ordered_json results = ordered_json::array();
  for (const Row& row : rows) {
    if (row.out_of_place) results.push_back(to_json(row, *row.out_of_place, false));
    if (row.in_place) results.push_back(to_json(row, *row.in_place, true));
  }
  ordered_json means = ordered_json::object();
  for (const Operation operation : operations_of(rows)) {
    if (operation != Operation::kBarrier) means[name_of(operation)] = mean_busbw(rows, operation);
  }
  const ordered_json report = {{"version", setting.version},
                               {"backend", setting.choice},
                               {"device", setting.device},
                               {"ranks", setting.ranks},
                               {"hosts", setting.hosts},
                               {"dtype", setting.dtype},
                               {"redop", setting.redop},
                               {"root", setting.root},
                               {"iterations", setting.iterations},
                               {"warmup", setting.warmup},
                               {"bandwidth_unit", "10^9 bytes a second"},
                               {"results", results},
                               {"mean_busbw", means},
                               {"wrong", was_checked(rows) ? ordered_json(total_wrong(rows)) : ordered_json()}};
  out << report.dump(2, ' ', false, ordered_json::error_handler_t::replace) << std::endl;
}

}  // namespace ds::tool::bench
