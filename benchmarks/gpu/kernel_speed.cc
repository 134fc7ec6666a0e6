#include "benchmarks/gpu/kernel_speed.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "compression/sign_codec.h"
#include "core/check.h"
#include "core/numbers/block_codec.h"

namespace ds::bench {
namespace {

constexpr int kInARow = 10;

class Table {
 public:
  Table(at::Device device, int rounds) : device_(device), rounds_(rounds) {}

  void add(const std::string& name, int64_t bytes, const std::function<void()>& work) {
    std::vector<double> seconds;
    for (int round = -1; round < rounds_; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kInARow; ++i) work();
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      if (round >= 0) {
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kInARow);
      }
    }
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    const double rate = static_cast<double>(bytes) / median;
    if (rows_.empty()) copy_rate_ = rate;
    rows_.push_back({{"name", name}, {"bytes", bytes}, {"seconds", median}, {"share_of_copy", rate / copy_rate_}});
  }
  nlohmann::ordered_json take() { return std::move(rows_); }

 private:
  at::Device device_;
  int rounds_;
  double copy_rate_ = 1;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

void require_same(const at::Tensor& found, const at::Tensor& expected, const std::string& name) {
  require<InternalError>(at::equal(found, expected), name, ": expected the bits of LibTorch's operators");
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

void add_block_codec(Table& table, const at::Tensor& values, int bits) {
  const BlockCodec codec(bits);
  const std::string name = cat("block codec, ", bits, " bits, ");
  const at::Tensor encoded = at::zeros({codec.encoded_bytes(values.numel())}, values.options().dtype(at::kByte));
  const at::Tensor expected = at::zeros_like(encoded);
  const at::Tensor decoded = at::empty_like(values);
  const at::Tensor decoded_expected = at::empty_like(values);
  codec.encode(values, encoded);
  codec.encode_by_operators(values, expected);
  require_same(encoded, expected, name + "encode");
  codec.decode(encoded, decoded);
  codec.decode_sum_by_operators({encoded}, decoded_expected);
  require_same(decoded, decoded_expected, name + "decode");
  table.add(name + "encode", bytes_of(values) + bytes_of(encoded), [&] { codec.encode(values, encoded); });
  table.add(name + "encode by operators", bytes_of(values) + bytes_of(encoded),
            [&] { codec.encode_by_operators(values, encoded); });
  const std::vector<at::Tensor> parts(4, encoded);
  for (const size_t count : {size_t{1}, parts.size()}) {
    const std::vector<at::Tensor> some(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(count));
    table.add(cat(name, "decode and add ", count), bytes_of(values) + bytes_of(encoded) * static_cast<int64_t>(count),
              [&] { codec.decode_sum(some, decoded, static_cast<int>(count)); });
  }
}

void add_sign_codec(Table& table, const at::Tensor& values) {
  const compression::SignCodec codec({{0, values.numel()}}, values.numel());
  const at::Tensor scales = at::zeros({1}, values.options());
  const at::Tensor bits = at::zeros({codec.bytes()}, values.options().dtype(at::kByte));
  const at::Tensor work = values.clone();
  table.add("sign codec, scales", bytes_of(values), [&] { codec.scales(work, scales); });
  table.add("sign codec, encode", 2 * bytes_of(values) + bytes_of(bits), [&] { codec.encode(work, scales, bits); });
  table.add("sign codec, decode", bytes_of(values) + bytes_of(bits), [&] { codec.decode(bits, scales, work); });
}

}  // namespace

nlohmann::ordered_json kernel_speeds(at::Device device, int64_t numel, int rounds) {
  Table table(device, rounds);
  const at::Tensor values = at::randn({numel}, at::device(device).dtype(at::kFloat));
  const at::Tensor other = at::empty_like(values);
  table.add("copy", 2 * bytes_of(values), [&] { other.copy_(values, /*non_blocking=*/true); });
  const at::Tensor narrow = values.to(at::kBFloat16);
  for (const int bits : {8, 4}) add_block_codec(table, narrow, bits);
  add_sign_codec(table, values);
  return table.take();
}

}  // namespace ds::bench
