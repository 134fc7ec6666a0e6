// Speed of the files that state is offloaded to (offload/aio_file, offload/slice_swapper).
//
//   nvme_bench --folder /nvme [--mib 1024] [--transfer_mib 64] [--block_size 1048576] [--queue_depth 8]
//              [--single_submit] [--no_overlap] [--no_steps]
//
// Writes a file of --mib twice (the first time its blocks are new to the file system) and reads it, one transfer of
// --transfer_mib after the other. Then, without --no_steps, Adam steps over float32 masters and two states of --mib
// together, in slices, with and without overlap, beside the same step in memory. GB/s of bytes read and written, 1 GB =
// 10^9; what is read is checked. benchmarks/nvme/compare.py runs it against fio.
#include <ATen/ATen.h>
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/check.h"
#include "offload/slice_swapper.h"

namespace {

using ds::offload::AioFile;

constexpr int64_t kSliceNumel = int64_t{4} << 20;
constexpr int64_t kTensorsOfSlice = 3;  // master, first and second moment
constexpr int kSteps = 10;              // every other one overlapped

struct Options {
  std::string folder;
  int64_t mib = 1024;
  int64_t transfer_mib = 64;
  ds::offload::AioOptions aio;
  bool no_overlap = false;
  bool no_steps = false;
};

at::Tensor mapped_bytes(int64_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ds::require<ds::Error>(memory != MAP_FAILED, "nvme_bench: no memory for ", bytes, " bytes");
  return at::from_blob(
      memory, {bytes}, [bytes](void* block) { ::munmap(block, bytes); }, at::kByte);
}

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const char* name, int64_t bytes, double seconds) {
  std::printf("%-22s %7.3f GB/s  %8.3f s\n", name, static_cast<double>(bytes) / seconds / 1e9, seconds);
  std::fflush(stdout);
}

std::unique_ptr<AioFile> file_of(const Options& options, int64_t bytes) {
  return std::make_unique<AioFile>(options.folder, "nvme_bench", bytes, options.aio, "--folder");
}

void sequential(const Options& options) {
  const int64_t bytes = options.mib << 20;
  const auto file = file_of(options, bytes);
  const at::Tensor memory = mapped_bytes(std::min(options.transfer_mib << 20, bytes));
  auto* const data = memory.mutable_data_ptr<uint8_t>();
  const auto pass = [&](bool writes) {
    for (int64_t offset = 0; offset < bytes; offset += memory.numel()) {
      const int64_t length = std::min(memory.numel(), bytes - offset);
      file->wait(writes ? file->write(offset, data, length) : file->read(offset, data, length));
    }
  };
  memory.random_(0, 256);
  const at::Tensor sum = memory.sum();
  print("first write", bytes, seconds_of([&] { pass(true); }));
  print("write", bytes, seconds_of([&] { pass(true); }));
  memory.zero_();
  print("read", bytes, seconds_of([&] { pass(false); }));
  ds::require<ds::InternalError>(bytes % memory.numel() != 0 || memory.sum().equal(sum),
                                 "nvme_bench: read other bytes");
}

void adam(const std::vector<at::Tensor>& slice, const at::Tensor& gradient) {
  slice[1].mul_(0.9).add_(gradient, 0.1);
  slice[2].mul_(0.99).addcmul_(gradient, gradient, 0.01);
  slice[0].addcdiv_(slice[1], slice[2].sqrt().add_(1e-8), -1e-3);
}

void step(const Options& options) {
  constexpr int64_t kBuffers = 4;
  const int64_t slices = std::max<int64_t>((options.mib << 20) / (kSliceNumel * kTensorsOfSlice * 4), 1);
  const auto sizes = ds::offload::SliceSwapper::sizes(
      std::vector<std::vector<int64_t>>(slices, std::vector<int64_t>(kTensorsOfSlice, kSliceNumel * 4)), kBuffers);
  ds::offload::SliceSwapper swapper(file_of(options, sizes.file_bytes), mapped_bytes(sizes.buffer_bytes), kBuffers);
  for (int64_t i = 0; i < slices; ++i) {
    std::vector<at::Tensor> tensors;
    for (int64_t t = 0; t < kTensorsOfSlice; ++t) tensors.push_back(at::zeros({kSliceNumel}));
    swapper.add(tensors);
  }
  const at::Tensor gradient = at::ones({kSliceNumel});
  std::vector<int64_t> order(slices);
  std::iota(order.begin(), order.end(), 0);
  const auto update = [&](int64_t index) { adam(swapper.tensors(index), gradient); };
  const auto pass = [&](bool overlap) { swapper.for_each(order, update, {overlap, overlap}); };
  const int64_t moved = 2 * sizes.file_bytes;
  std::vector<double> seconds[2];
  for (int i = 0; i < kSteps; ++i) seconds[i % 2].push_back(seconds_of([&] { pass(i % 2 == 1); }));
  print("step, one by one", moved, median(seconds[0]));
  print("step, overlapped", moved, median(seconds[1]));

  std::vector<at::Tensor> plain;
  for (int64_t t = 0; t < kTensorsOfSlice; ++t) plain.push_back(at::zeros({kSliceNumel}));
  for (int i = 0; i < kSteps; ++i) adam(plain, gradient);
  for (const int64_t index : {int64_t{0}, slices - 1}) {
    swapper.with(index, false, [&](int64_t slice) {
      for (int64_t t = 0; t < kTensorsOfSlice; ++t) {
        ds::require<ds::InternalError>(swapper.tensors(slice)[t].equal(plain[t]), "nvme_bench: slice ", slice,
                                       " differs");
      }
    });
  }
  print("step, in memory", moved, seconds_of([&] {
          for (int64_t i = 0; i < slices; ++i) adam(plain, gradient);
        }));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Speed of files that state is offloaded to");
  app.add_option("--folder", options.folder, "a folder on the disk to measure")->required();
  app.add_option("--mib", options.mib, "size of the file, in MiB")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--transfer_mib", options.transfer_mib, "size of a transfer, in MiB")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--block_size", options.aio.block_size, "bytes of one request")->capture_default_str();
  app.add_option("--queue_depth", options.aio.queue_depth, "requests in flight")->capture_default_str();
  app.add_flag("--single_submit", options.aio.single_submit, "aio.single_submit");
  app.add_flag("--no_overlap", options.no_overlap, "aio.overlap_events false");
  app.add_flag("--no_steps", options.no_steps, "reads and writes only");
  CLI11_PARSE(app, argc, argv);
  options.aio.overlap_events = !options.no_overlap;
  try {
    sequential(options);
    if (!options.no_steps) step(options);
  } catch (const ds::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
