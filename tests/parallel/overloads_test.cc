// A rule is for one overload: the others of the same name, as those that write to `out`, are computed too.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "dsengine/ops.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

struct OutCase {
  std::string name;
  std::function<void(at::Tensor& out, const at::Tensor& x, const at::Tensor& y)> run;  // x [4, 6], y [6, 4]
};

std::vector<OutCase> out_cases() {
  return {
      {"mm", [](auto& out, auto& x, auto& y) { at::mm_out(out, x, y); }},
      {"matmul", [](auto& out, auto& x, auto& y) { at::matmul_out(out, x, y); }},
      {"addmm", [](auto& out, auto& x, auto& y) { at::addmm_out(out, y.select(0, 0), x, y); }},
      {"linear", [](auto& out, auto& x, auto& y) { at::linear_out(out, x, y.t()); }},
      {"bmm", [](auto& out, auto& x, auto& y) { at::bmm_out(out, x.unsqueeze(0), y.unsqueeze(0)); }},
      {"baddbmm",
       [](auto& out, auto& x, auto& y) {
         at::baddbmm_out(out, at::ones({4, 4}, at::kDouble), x.unsqueeze(0), y.unsqueeze(0), 0.5, 2);
       }},
      {"sum", [](auto& out, auto& x, auto&) { at::sum_out(out, x, {0}); }},
      {"mean", [](auto& out, auto& x, auto&) { at::mean_out(out, x, {1}); }},
      {"amax", [](auto& out, auto& x, auto&) { at::amax_out(out, x, {1}); }},
      {"softmax", [](auto& out, auto& x, auto&) { at::softmax_out(out, x, 1); }},
      {"cat",
       [](auto& out, auto& x, auto& y) {
         at::cat_out(out, {x, y.t()}, 1);
       }},
      {"stack",
       [](auto& out, auto& x, auto& y) {
         at::stack_out(out, {x, y.t()}, 0);
       }},
      {"gather",
       [](auto& out, auto& x, auto&) {
         at::gather_out(out, x, 1, at::zeros({4, 2}, at::kLong));
       }},
      {"index_select",
       [](auto& out, auto& x, auto&) {
         at::index_select_out(out, x, 0, at::tensor({2, 1}, at::kLong));
       }},
      {"mse_loss", [](auto& out, auto& x, auto& y) { at::mse_loss_out(out, x, y.t()); }},
      {"cumsum", [](auto& out, auto& x, auto&) { at::cumsum_out(out, x, 1); }},
      {"tril", [](auto& out, auto& x, auto&) { at::tril_out(out, x); }},
      {"mul", [](auto& out, auto& x, auto& y) { at::mul_out(out, x, y.t()); }},
      {"clone", [](auto& out, auto& x, auto&) { at::clone_out(out, x); }},
  };
}

TEST(Overloads, ThatWriteToATensorOfTheProgramWriteIt) {
  const at::Tensor x = at::arange(24, at::kDouble).view({4, 6}).sin();
  const at::Tensor y = at::arange(24, at::kDouble).view({6, 4}).cos();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    for (const OutCase& op : out_cases()) {
      at::Tensor expected = at::empty({0}, at::kDouble);
      op.run(expected, x, y);
      for (const int64_t dim : {0, 1}) {
        at::Tensor plain = at::full(expected.sizes(), 777.0, at::kDouble);
        op.run(plain, distribute(x, axis, dim), distribute(y, axis, dim));
        EXPECT_LE(relative_error(plain, expected), 1e-12) << op.name << ", dimension " << dim;
        op.run(plain.fill_(777.0), x, distribute(y, axis, dim));
        EXPECT_LE(relative_error(plain, expected), 1e-12) << op.name << ", the second alone, dimension " << dim;
        if (expected.dim() == 0) continue;
        at::Tensor split = distribute(at::full(expected.sizes(), 777.0, at::kDouble), axis, 0);
        op.run(split, distribute(x, axis, dim), y);
        EXPECT_LE(relative_error(whole(split), expected), 1e-12) << op.name << ", into a split tensor";
        EXPECT_TRUE(is_split(split));
      }
    }
  });
}

TEST(Overloads, NormsAreThoseOfTheWhole) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor values = at::arange(24, at::kDouble).view({4, 6}).sin();
    const at::Tensor more = values.cos();
    const at::Tensor weight = at::arange(6, at::kDouble) + 0.5;
    const ops::NormedSum expected = ops::add_layer_norm(values, more, weight, {});
    for (const int64_t dim : {0, 1}) {
      const at::Tensor x = distribute(values, axis, dim);
      EXPECT_LE(relative_error(whole(ops::rms_norm(x, {})), ops::rms_norm(values, {})), 1e-12);
      for (const at::Tensor& residual : {more, distribute(more, axis, dim)}) {
        const ops::NormedSum found = ops::add_layer_norm(x, residual, weight, {});
        EXPECT_LE(relative_error(whole(found.normed), expected.normed), 1e-12) << "dimension " << dim;
        EXPECT_LE(relative_error(whole(found.sum), expected.sum), 1e-12) << "dimension " << dim;
      }
    }
  });
}

TEST(Overloads, VectorKernelsRefuseSplitTensors) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor x = distribute(at::ones({4, 6}), axis, 1);
    EXPECT_THROW(ops::swiglu(x, x), c10::Error);
    EXPECT_THROW(ops::rope(x, at::ones({4, 3}), at::ones({4, 3})), c10::Error);
  });
}

TEST(Overloads, OfConversionsKeepTheCut) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    const at::Tensor x = distribute(at::ones({4, 6}), axis, 1);
    for (const at::Tensor& converted :
         {x.to(at::kDouble), x.to(x.new_zeros({1}, at::kDouble)), x.to(at::TensorOptions().dtype(at::kDouble)),
          x.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true)}) {
      EXPECT_TRUE(is_split(converted));
      EXPECT_EQ(converted.scalar_type(), at::kDouble);
    }
    EXPECT_TRUE(axis->joined_operators().empty());
    const at::Tensor whole = x.to(at::Device(at::kCPU), at::kDouble);  // what printing asks for, to read its memory
    EXPECT_FALSE(is_split(whole));
    EXPECT_TRUE(whole.equal(at::ones({4, 6}, at::kDouble)));
  });
}

}  // namespace
}  // namespace ds::parallel
