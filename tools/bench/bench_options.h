// The flags of `ds-tool bench`.
#pragma once

#include <c10/core/ScalarType.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "dsengine/comm.h"
#include "tools/bench/bandwidth.h"

namespace ds::tool::bench {

// As the command line has them.
struct BenchFlags {
  std::string operation = "all";
  std::string min = "1K", max = "64M";  // bytes of the whole tensor
  int64_t factor = 4;
  std::string dtype = "float32";
  std::string redop = "sum";
  std::string backend = "auto";
  std::string device;  // empty: cuda for nccl, else cpu
  int root = 0;
  int iterations = 20, warmup = 5;
  int64_t timeout_s = 600;
  bool check = true;
  bool json = false;
};

struct BenchOptions {
  std::vector<Operation> operations;
  std::vector<int64_t> sizes;  // bytes
  at::ScalarType dtype = at::kFloat;
  comm::ReduceOp reduce_op = comm::ReduceOp::kSum;
  comm::Backend backend = comm::Backend::kAuto;
  std::string device;
};

void add_flags(CLI::App& app, BenchFlags& flags);
// Throws ConfigError that names the flag.
BenchOptions resolve(const BenchFlags& flags);

}  // namespace ds::tool::bench
