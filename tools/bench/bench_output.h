// The output of rank 0: the table of nccl-tests, or one JSON object.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tools/bench/bandwidth.h"

namespace ds::tool::bench {

// One kind of call at one size.
struct Measurement {
  double microseconds = 0;  // a call takes; mean over iterations and ranks
  double algbw = 0;         // 10^9 bytes a second
  double busbw = 0;
  std::optional<int64_t> wrong;  // elements with a wrong value, on all ranks; absent: not checked
};

struct Row {
  Operation operation = Operation::kAllReduce;
  Amount amount;
  std::optional<Measurement> out_of_place, in_place;  // absent: there is no such call
};

// The facts that all rows share.
struct BenchSetting {
  std::string version;
  std::string choice;              // BackendChoice::reason
  std::string device;              // "cpu", "cuda"
  std::vector<std::string> ranks;  // "host7, pid 4711"
  int hosts = 1;
  std::string dtype, redop;
  int root = 0;
  int iterations = 0, warmup = 0;
};

void print_setting(const BenchSetting& setting, std::ostream& out);
void print_heading(Operation operation, std::ostream& out);
void print_row(const Row& row, const BenchSetting& setting, std::ostream& out);

// The mean busbw of an operation over all sizes, in and out of place; 0 where there is no row.
double mean_busbw(const std::vector<Row>& rows, Operation operation);
int64_t total_wrong(const std::vector<Row>& rows);
int exit_code_of(const std::vector<Row>& rows);  // 1 when something was wrong, else 0
void print_summary(const std::vector<Row>& rows, std::ostream& out);
void print_json(const BenchSetting& setting, const std::vector<Row>& rows, std::ostream& out);

}  // namespace ds::tool::bench
