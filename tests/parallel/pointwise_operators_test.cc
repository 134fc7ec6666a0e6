// The tag `pointwise` is taken at its word: every operator that has it, with split tensors, against plain ones.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

// Out-of-place operators with the tag that draw no random numbers and take tensors alone, not lists of them.
std::vector<c10::OperatorHandle> tagged_operators() {
  std::vector<c10::OperatorHandle> result;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasTag(at::Tag::pointwise) || op->hasTag(at::Tag::nondeterministic_seeded)) continue;
    const bool changes = op->schema().is_mutable();
    if (!changes) result.push_back(*op);
  }
  return result;
}

// Arguments by their types; nothing where a type is not known here.
std::optional<torch::jit::Stack> arguments_for(const c10::FunctionSchema& schema) {
  torch::jit::Stack stack;
  int64_t tensors = 0;
  for (const c10::Argument& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type == "Tensor" || (type == "Tensor?" && tensors < 3)) {
      const int64_t begin = 3 * ++tensors;
      stack.emplace_back((at::arange(begin, begin + 24, at::kDouble).view({4, 6}) * 0.61).sin() * 0.4 + 0.5);
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (type == "Scalar" || type == "number" || type == "float") {
      stack.emplace_back(0.5);
    } else if (type == "int") {
      stack.emplace_back(1);
    } else if (type == "bool") {
      stack.emplace_back(false);
    } else {
      return std::nullopt;
    }
  }
  return stack;
}

torch::jit::Stack with_split(const torch::jit::Stack& arguments, const std::shared_ptr<Axis>& axis, int64_t dim,
                             size_t which) {
  torch::jit::Stack result = arguments;
  size_t tensors = 0;
  for (c10::IValue& value : result) {
    if (value.isTensor() && (which == 0 || ++tensors == which)) value = distribute(value.toTensor(), axis, dim);
  }
  return result;
}

// The results of plain tensors; nothing where the operator takes no such tensors (integers alone, say).
std::optional<torch::jit::Stack> plain_results(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  torch::jit::Stack stack = arguments;
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

TEST(PointwiseOperators, AllThatHaveTheTagAreElementByElement) {
  const std::vector<c10::OperatorHandle> ops = tagged_operators();
  EXPECT_GT(ops.size(), 150U);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Axis> axis = make_axis(shared(communicator));
    int tried = 0;
    for (const c10::OperatorHandle& op : ops) {
      const auto arguments = arguments_for(op.schema());
      const auto expected = arguments ? plain_results(op, *arguments) : std::nullopt;
      if (!expected) continue;
      ++tried;
      for (const int64_t dim : {0, 1}) {
        for (const size_t which : {0, 1, 2}) {
          torch::jit::Stack found = with_split(*arguments, axis, dim, which);
          op.callBoxed(found);
          ASSERT_EQ(found.size(), expected->size());
          for (size_t i = 0; i < found.size(); ++i) {
            if (!found[i].isTensor()) continue;
            const at::Tensor result = whole(found[i].toTensor()).nan_to_num();
            EXPECT_LE(relative_error(result, (*expected)[i].toTensor().nan_to_num()), 1e-12)
                << c10::toString(op.operator_name()) << ", dimension " << dim << ", tensor " << which;
          }
        }
      }
    }
    EXPECT_GT(tried, 120) << "most of the operators take doubles";
  });
}

}  // namespace
}  // namespace ds::parallel
