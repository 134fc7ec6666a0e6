#include "optim/chunked_update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

namespace ds::optimizers {
namespace {

// Elements of a chunk. On the host a chunk of master and gradient stays in the cache; a device wants fewer launches.
constexpr int64_t kHostChunk = int64_t{1} << 18;
constexpr int64_t kDeviceChunk = int64_t{1} << 24;

// A flat tensor in the dtype of the arithmetic, one chunk at a time: itself, or converted. Undefined stays undefined.
class ChunkValues {
 public:
  ChunkValues(const at::Tensor& flat, at::ScalarType type, int64_t most)
      : flat_(flat), converts_(flat.defined() && flat.scalar_type() != type) {
    if (converts_) buffer_ = at::empty({most}, flat.options().dtype(type));
  }
  at::Tensor read(int64_t begin, int64_t length) const {
    if (!flat_.defined()) return {};
    const at::Tensor own = flat_.narrow(0, begin, length);
    return converts_ ? buffer_.narrow(0, 0, length).copy_(own) : own;
  }
  void write(int64_t begin, const at::Tensor& values) const {
    if (converts_) flat_.narrow(0, begin, values.numel()).copy_(values);
  }

 private:
  at::Tensor flat_;
  bool converts_;
  at::Tensor buffer_;
};

}  // namespace

at::ScalarType state_type(at::ScalarType master) { return master == at::kDouble ? at::kDouble : at::kFloat; }

void for_each_chunk(const at::Tensor& master, const at::Tensor& gradient, KernelMemory memory,
                    const SliceKernel& kernel) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = state_type(master.scalar_type());
  const int64_t total = master.numel();
  if (total == 0) return;
  if (memory == KernelMemory::kFused && master.scalar_type() == type && gradient.scalar_type() == type) {
    kernel(0, master, gradient);
    return;
  }
  const int64_t most = std::min(total, master.is_cpu() ? kHostChunk : kDeviceChunk);
  ChunkValues masters(master, type, most);
  ChunkValues gradients(gradient, type, most);
  for (int64_t begin = 0; begin < total; begin += most) {
    const int64_t length = std::min(most, total - begin);
    const at::Tensor m = masters.read(begin, length);
    kernel(begin, m, gradients.read(begin, length));
    masters.write(begin, m);
  }
}

void for_each_chunk(const at::Tensor& master, const std::vector<at::Tensor>& states, const at::Tensor& gradient,
                    KernelMemory memory, const StatefulKernel& kernel) {
  const at::ScalarType type = state_type(master.scalar_type());
  for (const at::Tensor& state : states) {
    if (state.defined() && state.scalar_type() != type) memory = KernelMemory::kTemporaries;
  }
  std::vector<ChunkValues> values;
  int64_t most = 0;  // of a chunk, which the first one has
  for_each_chunk(master, gradient, memory, [&](int64_t begin, const at::Tensor& m, const at::Tensor& g) {
    most = std::max(most, m.numel());
    if (values.empty()) {
      for (const at::Tensor& state : states) values.emplace_back(state, type, most);
    }
    std::vector<at::Tensor> chunks;
    for (ChunkValues& value : values) chunks.push_back(value.read(begin, m.numel()));
    kernel(m, g, chunks);
    for (size_t i = 0; i < values.size(); ++i) values[i].write(begin, chunks[i]);
  });
}

std::optional<at::Tensor> fused_grad_scale(double gradient_scale, const at::Tensor& master) {
  if (gradient_scale == 1.0 || state_type(master.scalar_type()) == at::kDouble) return std::nullopt;
  return at::full({}, 1.0 / gradient_scale, at::TensorOptions().dtype(at::kFloat).device(master.device()));
}

void scale_wide(const at::Tensor& gradient, double gradient_scale) {
  if (gradient_scale != 1.0 && gradient.scalar_type() == at::kDouble) at::Tensor(gradient).mul_(gradient_scale);
}

at::Tensor fused_step(double step, at::Device device) {
  return at::full({}, step, at::TensorOptions().dtype(at::kFloat).device(device));
}

}  // namespace ds::optimizers
