// Operators of <dsengine/ops.h> on a GPU, where they are LibTorch's.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "dsengine/ops.h"
#include "tests/gpu/tested_device.h"

namespace ds::ops {
namespace {

class GpuOps : public ::testing::Test {
 protected:
  // Of a formula, the same on every device.
  static at::Tensor values(at::IntArrayRef sizes, double phase, at::ScalarType type) {
    const int64_t count = c10::multiply_integers(sizes);
    return (at::sin(at::arange(count, at::kDouble) * 1.7 + phase) * 2.0).view(sizes).to(type);
  }
  at::Tensor there(const at::Tensor& tensor) const { return tensor.to(device_); }

  const at::Device device_ = test::tested_device();
};

struct Autocast {
  explicit Autocast(at::DeviceType of) : device(of) {
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    at::autocast::set_autocast_enabled(device, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(device, false);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  at::DeviceType device;
};

// Autocast has layer_norm among the operators that it runs in float32, and gives their results.
TEST_F(GpuOps, AutocastChangesNothing) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const at::ScalarType of_rows : {type, at::kFloat}) {
      const at::Tensor x = there(values({3, 8}, 0.2, type));
      const at::Tensor residual = there(values({3, 8}, 1.3, type));
      const at::Tensor weight = there(values({8}, 0.7, of_rows));
      const at::Tensor bias = there(values({8}, 2.1, of_rows));
      const RopeTables tables = rope_tables(3, 8);
      const at::Tensor cos = there(tables.cos);
      const at::Tensor sin = there(tables.sin);
      const auto all = [&]() -> std::vector<at::Tensor> {
        const NormedSum rms = add_rms_norm(x, residual, weight);
        const NormedSum layer = add_layer_norm(x, residual, weight, bias);
        return {layer_norm(x, weight, bias), rms_norm(x, weight), rms.normed, rms.sum, layer.normed, layer.sum,
                swiglu(x, residual),         rope(x, cos, sin)};
      };
      const std::vector<at::Tensor> expected = all();
      const Autocast on(device_.type());
      const std::vector<at::Tensor> found = all();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i].scalar_type(), type) << "result " << i;
        EXPECT_TRUE(at::equal(found[i].cpu(), expected[i].cpu())) << "result " << i << " of " << type;
      }
    }
  }
}

}  // namespace
}  // namespace ds::ops
