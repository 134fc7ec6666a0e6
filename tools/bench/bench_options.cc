#include "tools/bench/bench_options.h"

#include <algorithm>
#include <array>
#include <utility>

#include "comm/backends/factory.h"
#include "core/check.h"
#include "launcher/command_line/number_flags.h"

namespace ds::tool::bench {
namespace {

constexpr int64_t kMostCalls = 1 << 24;  // and seconds, and ranks
constexpr std::array kDtypes = {std::pair("float32", at::kFloat),     std::pair("float64", at::kDouble),
                                std::pair("bfloat16", at::kBFloat16), std::pair("float16", at::kHalf),
                                std::pair("int8", at::kChar),         std::pair("uint8", at::kByte),
                                std::pair("int32", at::kInt),         std::pair("int64", at::kLong)};
constexpr std::array kReduceOps = {std::pair("sum", comm::ReduceOp::kSum), std::pair("min", comm::ReduceOp::kMin),
                                   std::pair("max", comm::ReduceOp::kMax)};

template <class Table>
auto entry(const Table& table, const char* flag, const std::string& name) {
  std::string known;
  for (const auto& [text, value] : table) {
    if (name == text) return value;
    known += cat(known.empty() ? "" : ", ", text);
  }
  throw ConfigError(cat(flag, ": expected one of ", known, ", found \"", name, "\""));
}

}  // namespace

void add_flags(CLI::App& app, BenchFlags& flags) {
  app.option_defaults()->always_capture_default();
  app.add_option("operation", flags.operation,
                 "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, sendrecv, barrier, or all")
      ->type_name("OPERATION");
  app.add_option("--min", flags.min, "Smallest tensor, bytes: 8, 1K, 64M, 2G")->type_name("SIZE");
  app.add_option("--max", flags.max, "Largest tensor")->type_name("SIZE");
  app.add_option("--factor", flags.factor, "From one size to the next")
      ->type_name("N")
      ->transform(whole_number(2, kMostCalls));
  app.add_option("--dtype", flags.dtype, "float32, float64, bfloat16, float16, int8, uint8, int32 or int64")
      ->type_name("DTYPE");
  app.add_option("--redop", flags.redop, "sum, min or max")->type_name("OP");
  app.add_option("--backend", flags.backend, "auto, shm, gloo or nccl, as communication_backend of a ds_config")
      ->type_name("NAME");
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N [cuda for nccl, else cpu]")
      ->capture_default_str()
      ->type_name("DEVICE");
  app.add_option("--root", flags.root, "Of broadcast and reduce")
      ->type_name("RANK")
      ->transform(whole_number(0, kMostCalls));
  app.add_option("--iterations", flags.iterations, "Timed calls of each size")
      ->type_name("N")
      ->transform(whole_number(1, kMostCalls));
  app.add_option("--warmup", flags.warmup, "Calls before them")->type_name("N")->transform(whole_number(0, kMostCalls));
  app.add_option("--timeout", flags.timeout_s, "Seconds that a rank waits for another")
      ->type_name("S")
      ->transform(whole_number(1, kMostCalls));
  app.add_flag("--check,!--no_check", flags.check, "Compare the results of each size with what they must be")
      ->default_str("on");
  app.add_flag("--json", flags.json, "Print one JSON object");
}

BenchOptions resolve(const BenchFlags& flags) {
  BenchOptions options;
  options.operations = parse_operations(flags.operation);
  options.sizes = size_steps(parse_size(flags.min, "--min"), parse_size(flags.max, "--max"), flags.factor);
  options.dtype = entry(kDtypes, "--dtype", flags.dtype);
  options.reduce_op = entry(kReduceOps, "--redop", flags.redop);
  options.backend = comm::parse_backend(flags.backend);
  const bool nccl = options.backend == comm::Backend::kNccl;
  options.device = flags.device.empty() ? (nccl ? "cuda" : "cpu") : flags.device;
  return options;
}

}  // namespace ds::tool::bench
