// Operators of <dsengine/ops.h> on a GPU: kernels, in every dtype.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/ops.h"
#include "dsengine/sparse_attention.h"
#include "tests/gpu/tested_device.h"
#include "tests/support/autocast_scope.h"

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

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// Of a function of leaves, and of formulas as gradients of its results: these, then the gradients of the leaves.
Tensors results_of(const Function& function, const Tensors& inputs, const Tensors& of_results) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  Tensors results = function(leaves);
  Tensors gradients;
  for (size_t i = 0; i < results.size(); ++i) gradients.push_back(of_results[i].to(results[i].options()));
  torch::autograd::backward(results, gradients);
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

double tolerance_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 1e-12;
    case at::kFloat:
      return 4e-6;
    case at::kHalf:
      return 0x1p-9;
    default:
      return 0x1p-7;
  }
}

// The operator on the device, of `type`, against LibTorch's chain in float64 on the CPU: of the same values, which
// `type` can hold.
void expect_as_chain(const Function& ours, const Function& chain, const Tensors& inputs, at::ScalarType type,
                     const std::string& what) {
  Tensors here;
  Tensors there;
  for (const at::Tensor& input : inputs) {
    there.push_back(input.to(type).to(test::tested_device()));
    here.push_back(input.to(type).to(at::kDouble));
  }
  Tensors gradients;
  for (const at::Tensor& result : chain(here)) {
    gradients.push_back(at::cos(at::arange(result.numel(), at::kDouble) * 0.9).view(result.sizes()).to(type));
  }
  const Tensors expected = results_of(chain, here, gradients);
  const Tensors found = results_of(ours, there, gradients);
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), type) << what << ", result " << i;
    const double difference = (found[i].cpu().to(at::kDouble) - expected[i]).abs().max().item<double>();
    EXPECT_LE(difference, tolerance_of(type) * (1.0 + expected[i].abs().max().item<double>()))
        << what << " of " << type << ", result " << i;
  }
}

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

// Rows that end with a pack, inside of one, and such as one team has to go through several times; more rows than
// blocks of a backward pass.
const std::vector<std::vector<int64_t>> kShapes = {{5, 64}, {2, 3, 33}, {4, 1024}, {300, 24}, {1, 1}, {3, 6000}};

TEST_F(GpuOps, NormsAndTheirGradientsAreThoseOfFloat64) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& shape : kShapes) {
      const int64_t size = shape.back();
      const std::string what = cat("rows of ", size);
      const Tensors inputs = {values(shape, 0.2, at::kDouble), values({size}, 0.7, at::kDouble),
                              values({size}, 2.1, at::kDouble), values(shape, 1.3, at::kDouble)};
      expect_as_chain([](const Tensors& in) { return Tensors{rms_norm(in[0], in[1])}; },
                      [&](const Tensors& in) { return Tensors{at::rms_norm(in[0], {size}, in[1], 1e-6)}; },
                      {inputs[0], inputs[1]}, type, cat("rms_norm, ", what));
      expect_as_chain([](const Tensors& in) { return Tensors{rms_norm(in[0], at::Tensor())}; },
                      [&](const Tensors& in) { return Tensors{at::rms_norm(in[0], {size}, {}, 1e-6)}; }, {inputs[0]},
                      type, cat("rms_norm without a weight, ", what));
      expect_as_chain(
          [](const Tensors& in) {
            const NormedSum made = add_rms_norm(in[0], in[2], in[1]);
            return Tensors{made.normed, made.sum};
          },
          [&](const Tensors& in) {
            const at::Tensor sum = in[0] + in[2];
            return Tensors{at::rms_norm(sum, {size}, in[1], 1e-6), sum};
          },
          {inputs[0], inputs[1], inputs[3]}, type, cat("add_rms_norm, ", what));
      if (size == 1) continue;  // what LayerNorm makes of one element is the bias
      expect_as_chain([](const Tensors& in) { return Tensors{layer_norm(in[0], in[1], in[2])}; },
                      [&](const Tensors& in) { return Tensors{at::layer_norm(in[0], {size}, in[1], in[2], 1e-5)}; },
                      {inputs[0], inputs[1], inputs[2]}, type, cat("layer_norm, ", what));
      expect_as_chain(
          [](const Tensors& in) {
            const NormedSum made = add_layer_norm(in[0], in[3], in[1], in[2]);
            return Tensors{made.normed, made.sum};
          },
          [&](const Tensors& in) {
            const at::Tensor sum = in[0] + in[3];
            return Tensors{at::layer_norm(sum, {size}, in[1], in[2], 1e-5), sum};
          },
          inputs, type, cat("add_layer_norm, ", what));
    }
  }
}

TEST_F(GpuOps, SwigluAndItsGradientsAreThoseOfFloat64) {
  const auto chain = [](const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; };
  for (const at::ScalarType type : kTypes) {
    for (const auto& shape : kShapes) {
      const Tensors inputs = {values(shape, 0.2, at::kDouble) * 3, values(shape, 1.1, at::kDouble)};
      const std::string what = cat("rows of ", shape.back());
      expect_as_chain([](const Tensors& in) { return Tensors{swiglu(in[0], in[1])}; },
                      [&](const Tensors& in) { return Tensors{chain(in[0], in[1])}; }, inputs, type,
                      cat("swiglu, ", what));
      expect_as_chain([](const Tensors& in) { return Tensors{swiglu(in[0])}; },
                      [&](const Tensors& in) {
                        const int64_t half = shape.back();
                        return Tensors{chain(in[0].narrow(-1, 0, half), in[0].narrow(-1, half, half))};
                      },
                      {at::cat(inputs, -1)}, type, cat("packed swiglu, ", what));
    }
  }
  const at::Tensor far = there(at::tensor({-100.0, -1e30, 100.0}, at::kFloat));
  EXPECT_TRUE(at::equal(swiglu(far, at::ones_like(far)).cpu().abs() > 1, at::tensor({0, 0, 1}).to(at::kBool)))
      << "exp() overflows to a factor of 0";
}

TEST_F(GpuOps, RopeAndItsGradientAreThoseOfFloat64) {
  for (const at::ScalarType type : kTypes) {
    for (const RopePairs pairs : {RopePairs::kHalves, RopePairs::kInterleaved}) {
      for (const int64_t channels : {64, 10, 72}) {
        const RopeTables tables = rope_tables(7, channels > 64 ? 64 : channels, 100.0, at::kDouble);
        const at::Tensor cos = there(tables.cos);
        const at::Tensor sin = there(tables.sin);
        // Heads before positions in a view of memory where they come behind.
        const at::Tensor x = values({2, 7, 3, channels}, 0.4, at::kDouble).transpose(1, 2);
        const RopeOptions options{.pairs = pairs};
        const auto chain = [&](const Tensors& in) {
          const int64_t turned = 2 * tables.cos.size(1);
          const at::Tensor both = in[0].narrow(-1, 0, turned);
          const bool halves = pairs == RopePairs::kHalves;
          const at::Tensor apart =
              halves ? both.unflatten(-1, {2, turned / 2}).transpose(-1, -2) : both.unflatten(-1, {turned / 2, 2});
          const at::Tensor a = apart.select(-1, 0);
          const at::Tensor b = apart.select(-1, 1);
          at::Tensor made = at::stack({a * tables.cos - b * tables.sin, b * tables.cos + a * tables.sin}, -1);
          if (halves) made = made.transpose(-1, -2);
          return Tensors{at::cat({made.flatten(-2), in[0].narrow(-1, turned, channels - turned)}, -1)};
        };
        expect_as_chain([&](const Tensors& in) { return Tensors{rope(in[0], cos, sin, options)}; }, chain, {x}, type,
                        cat("rope of ", channels, " channels"));
      }
    }
  }
}

// Names of operators that ran while it lives.
class Operators {
 public:
  Operators() : handle_(at::addGlobalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}))) {
    names().clear();
  }
  ~Operators() { at::removeCallback(handle_); }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;
  static std::set<std::string>& names() {
    static std::set<std::string> found;
    return found;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    names().insert(function.name());
    return nullptr;
  }
  at::CallbackHandle handle_;
};

TEST_F(GpuOps, AreKernels) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor x = there(values({3, 8}, 0.2, type));
    const RopeTables tables = rope_tables(3, 8);
    const at::Tensor cos = there(tables.cos);
    const at::Tensor sin = there(tables.sin);
    const Operators operators;
    rms_norm(x, x[0]);
    add_layer_norm(x, x, x[0], x[1]);
    swiglu(x, x);
    rope(x, cos, sin);
    for (const char* name : {"dsengine::rms_norm", "dsengine::add_layer_norm", "dsengine::swiglu", "dsengine::rope"}) {
      EXPECT_TRUE(Operators::names().contains(name)) << name << " of " << type;
    }
    EXPECT_FALSE(Operators::names().contains("aten::silu")) << type;
  }
}

TEST_F(GpuOps, RefuseASecondDerivative) {
  const at::Tensor x = there(values({3, 8}, 0.2, at::kFloat)).requires_grad_(true);
  const at::Tensor y = swiglu(x, x).sum();
  try {
    torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    FAIL() << "expected UsageError";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("without create_graph"), std::string::npos) << error.what();
  }
}

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
      const test::AutocastScope on(at::kBFloat16, device_.type());
      const std::vector<at::Tensor> found = all();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i].scalar_type(), type) << "result " << i;
        EXPECT_TRUE(at::equal(found[i].cpu(), expected[i].cpu())) << "result " << i << " of " << type;
      }
    }
  }
}

// Beside the kernels of the CPU in float64.
TEST_F(GpuOps, SparseAttentionIsThatOfTheCpu) {
  const SparsityPattern pattern{.mode = SparsityMode::kBigBird,
                                .block = 8,
                                .different_layout_per_head = true,
                                .num_random_blocks = 1,
                                .num_sliding_window_blocks = 1};
  for (const at::ScalarType type : kTypes) {
    for (const bool causal : {false, true}) {
      const SparseSelfAttention attend(pattern, 2, 5);
      const auto of = [&](const Tensors& in) {
        const at::Tensor padding = at::arange(2 * 43, in[0].device()).view({2, 43}).remainder(9).ne(4);
        const at::Tensor bias = values({1, 2, 43, 43}, 0.6, at::kDouble).to(in[0].options());
        return Tensors{attend(in[0], in[1], in[2],
                              {.causal = causal,
                               .key_padding_mask = padding,
                               .key_padding_mask_mode = MaskMode::kMultiply,
                               .attention_mask = bias.detach(),
                               .attention_mask_mode = MaskMode::kAdd})};
      };
      Tensors inputs;
      for (const double phase : {0.2, 0.9, 1.7}) inputs.push_back(values({2, 2, 43, 6}, phase, at::kDouble) * 0.5);
      expect_as_chain(of, of, inputs, type, cat("sparse attention, ", causal ? "causal" : "not causal"));
    }
  }
}

}  // namespace
}  // namespace ds::ops
