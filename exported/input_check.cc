#include "exported/input_check.h"

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/listed.h"
#include "core/shown_text.h"
#include "exported/size_expression.h"

namespace ds::exported {
namespace {

std::string names_of(const Program& program) {
  std::vector<std::string> names;
  for (const ExportedInput& input : program.inputs) names.push_back(input.name);
  return listed(names, 20);
}

// Dtypes that take each other's place: casts of a model, and integers that index.
enum class DtypeKind : uint8_t { kFloating, kComplex, kWhole, kBool };

DtypeKind kind_of(at::ScalarType dtype) {
  if (dtype == at::kBool) return DtypeKind::kBool;
  if (c10::isComplexType(dtype)) return DtypeKind::kComplex;
  return c10::isFloatingType(dtype) ? DtypeKind::kFloating : DtypeKind::kWhole;
}

std::string in_words(const c10::IValue& value) {
  if (value.isTensor()) return cat("a tensor ", value.toTensor().sizes());
  if (value.isNone()) return "None";
  return cat(value);
}

// Whether two numbers are equal as Python compares them: no bit of a large whole number is lost. NaN equals itself.
bool is_same_number(const at::Scalar& a, const at::Scalar& b) {
  if (a.isComplex() || b.isComplex()) return a.toComplexDouble() == b.toComplexDouble();
  if (a.isFloatingPoint() && b.isFloatingPoint()) {
    return a.toDouble() == b.toDouble() || (std::isnan(a.toDouble()) && std::isnan(b.toDouble()));
  }
  if (a.isFloatingPoint()) return is_same_number(b, a);
  if (!b.isFloatingPoint()) return a.toLong() == b.toLong();
  constexpr double kEnd = 9223372036854775808.0;  // of int64_t, which a double can be
  const double real = b.toDouble();
  return real >= -kEnd && real < kEnd && std::trunc(real) == real && static_cast<int64_t>(real) == a.toLong();
}

// Whether a caller's value is the one that was exported; a number may be of another type.
bool is_baked_value(const c10::IValue& baked, const c10::IValue& given) {
  if (baked.isNone() || given.isNone()) return baked.isNone() && given.isNone();
  if (baked.isScalar() && given.isScalar()) return is_same_number(baked.toScalar(), given.toScalar());
  return baked.tagKind() == given.tagKind() && baked == given;
}

// Whether the node is an operator whose argument "dtype" was exported as `dtype`.
bool has_baked_dtype(const Node& node, at::ScalarType dtype) {
  if (node.kind != Node::Kind::kOperator) return false;
  const auto& declared = node.op->schema().arguments();
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const c10::IValue& value = node.arguments[i].constant;
    if (declared[i].name() == "dtype" && value.isInt()) return value.toInt() == static_cast<int64_t>(dtype);
  }
  return false;
}

// Checks the sizes of all inputs of one call against one another.
class SizeCheck {
 public:
  explicit SizeCheck(const Program& program) : program_(program) {}

  // Checks fixed sizes, ranges, and plain symbols, which have to be the same wherever they are.
  void bind(const ExportedInput& input, const at::Tensor& x) {
    for (size_t d = 0; d < input.sizes.size(); ++d) {
      const ExportedSize& size = input.sizes[d];
      const int64_t given = x.size(static_cast<int64_t>(d));
      require(!size.symbol.empty() || given == size.least, "forward: \"", input.name, "\" is ", x.sizes(),
              "; dimension ", d, " was exported as ", size.least,
              ", not as a dynamic one (dynamic_shapes of torch.export.export)");
      require(given >= size.least && given <= size.most, "forward: \"", input.name, "\" is ", x.sizes(), "; dimension ",
              d, " was exported for ", size.least, " to ",
              lazy([&] { return size.most == INT64_MAX ? std::string("any size") : cat(size.most); }),
              " (dynamic_shapes of torch.export.export)");
      if (size.symbol.empty() || program_.expressions.contains(size.symbol)) continue;
      const int64_t bound = bound_.try_emplace(size.symbol, given).first->second;
      require(bound == given, "forward: \"", input.name, "\" is ", x.sizes(), "; dimension ", d,
              " has to be as large as ", lazy([&] { return first_with(size.symbol); }), ", which is ", bound);
    }
  }

  // Checks sizes that are computed from symbols. It is called when bind() has seen all inputs.
  void check_expressions(const ExportedInput& input, const at::Tensor& x) {
    for (size_t d = 0; d < input.sizes.size(); ++d) {
      const auto found = program_.expressions.find(input.sizes[d].symbol);
      if (found == program_.expressions.end()) continue;
      const int64_t given = x.size(static_cast<int64_t>(d));
      const std::optional<int64_t> expected = found->second.value(bound_);
      if (const auto solved = expected ? std::nullopt : found->second.solved(bound_, given)) {
        bound_.insert(*solved);
        continue;
      }
      require(expected == given, "forward: \"", input.name, "\" is ", x.sizes(), "; dimension ", d, " was exported as ",
              found->first,
              lazy([&] { return expected ? cat(", which is ", *expected, " for the other sizes") : std::string(); }),
              " (dynamic_shapes of torch.export.export)");
    }
  }

 private:
  // The first dimension of a symbol, which has bound it, in words.
  std::string first_with(const std::string& symbol) const {
    for (const ExportedInput& input : program_.inputs) {
      for (size_t d = 0; d < input.sizes.size(); ++d) {
        if (input.sizes[d].symbol == symbol) return cat("dimension ", d, " of \"", input.name, "\"");
      }
    }
    return symbol;
  }

  const Program& program_;
  std::map<std::string, int64_t> bound_;
};

}  // namespace

std::vector<c10::IValue> by_position(const Program& program, std::vector<c10::IValue> inputs) {
  const size_t expected = program.inputs.size();
  require(inputs.size() <= expected, "forward: expected at most ", expected, " inputs (",
          lazy([&] { return names_of(program); }), "), got ", inputs.size());
  for (size_t i = inputs.size(); i < expected; ++i) {
    require(!program.inputs[i].is_tensor, "forward: expected ", expected, " inputs (",
            lazy([&] { return names_of(program); }), "), got ", inputs.size(), "; \"", program.inputs[i].name,
            "\" is missing");
    inputs.push_back(program.inputs[i].value);
  }
  return inputs;
}

std::vector<c10::IValue> by_name(const Program& program, const ExportedInputs& inputs) {
  std::vector<c10::IValue> result;
  for (const ExportedInput& input : program.inputs) {
    const auto is_it = [&](const auto& given) { return given.first == input.name; };
    const auto found = std::find_if(inputs.begin(), inputs.end(), is_it);
    require(found != inputs.end() || !input.is_tensor, "forward: the input \"", input.name, "\" is missing; expected ",
            lazy([&] { return names_of(program); }));
    require(std::count_if(inputs.begin(), inputs.end(), is_it) <= 1, "forward: the input \"", input.name,
            "\" is given twice");
    result.push_back(found == inputs.end() ? input.value : found->second);
  }
  for (const auto& [name, value] : inputs) {
    require(std::any_of(program.inputs.begin(), program.inputs.end(),
                        [&name = name](const ExportedInput& input) { return input.name == name; }),
            "forward: no input \"", name, "\"; expected ", lazy([&] { return names_of(program); }));
  }
  return result;
}

void require_mode(const Program& program, bool training, bool has_eval) {
  if (program.baked_mode) return;
  require(!training || !program.exported_in_eval, program.path,
          ": was exported in eval(), so that it cannot train: call model.train() before torch.export.export, or "
          "eval() on this module to evaluate. A model in which these layers evaluate on purpose is loaded with "
          "ExportedOptions::baked_mode");
  require(training || has_eval || !program.decomposed, program.path,
          ": was exported with run_decompositions(), which bakes the mode: export it without, give a second file as "
          "ExportedOptions::eval, or load it with ExportedOptions::baked_mode where both modes are one");
}

void require_dtype(const Program& program, at::ScalarType dtype, const std::string& key) {
  if (dtype == program.dtype) return;
  constexpr size_t kMostShown = 3;
  std::string shown;
  size_t count = 0;
  for (const Graph& graph : program.graphs) {
    for (const Node& node : graph.nodes) {
      if (!has_baked_dtype(node, program.dtype)) continue;
      if (++count <= kMostShown) shown += cat("\n", node_in_words(node), line_in_python(node));
    }
  }
  if (count == 0) return;
  throw ConfigError(cat(key, ": ", program.path, " was exported in ", c10::toString(program.dtype), ", and ", count,
                        " of its operators have that dtype baked; export the model in ", c10::toString(dtype),
                        " (model.to(dtype) before torch.export.export), or keep its dtype and use torch_autocast. The "
                        "first ones:",
                        shown));
}

void check_inputs(const Program& program, const std::vector<c10::IValue>& inputs) {
  SizeCheck sizes(program);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ExportedInput& input = program.inputs[i];
    if (!input.is_tensor) {
      require(is_baked_value(input.value, inputs[i]), "forward: \"", input.name, "\" was ",
              lazy([&] { return in_words(input.value); }), " when the model was exported, which is baked; found ",
              lazy([&] { return in_words(inputs[i]); }),
              ". Export the model once more with that value, or make it a tensor");
      continue;
    }
    require(inputs[i].isTensor() && inputs[i].toTensor().defined(), "forward: \"", input.name,
            "\" has to be a tensor, found ", lazy([&] { return in_words(inputs[i]); }));
    const at::Tensor& x = inputs[i].toTensor();
    require(kind_of(x.scalar_type()) == kind_of(input.dtype), "forward: \"", input.name, "\" is of dtype ",
            c10::toString(x.scalar_type()), ", exported as ", c10::toString(input.dtype));
    require(x.dim() == static_cast<int64_t>(input.sizes.size()), "forward: \"", input.name, "\" is ", x.sizes(),
            ", exported with ", input.sizes.size(), " dimensions");
    sizes.bind(input, x);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (program.inputs[i].is_tensor) sizes.check_expressions(program.inputs[i], inputs[i].toTensor());
  }
}

void require_eval_of(const Program& train, const Program& eval) {
  const auto has_name = [](const ExportedInput& a, const ExportedInput& b) { return a.name == b.name; };
  require<IoError>(
      std::equal(eval.inputs.begin(), eval.inputs.end(), train.inputs.begin(), train.inputs.end(), has_name), eval.path,
      ": has the inputs ", names_of(eval), "; expected those of ", train.path, ", ", names_of(train));
  require<IoError>(eval.baked_mode || !eval.trains, eval.path,
                   ": was exported in train(), and is named as the program for eval(); export it after model.eval()");
}

void require_same_tensor(const std::string& name, at::IntArrayRef sizes, std::optional<at::IntArrayRef> first) {
  require<IoError>(first.has_value(), "the first file has no tensor \"", shown_text(name),
                   "\"; export both from one model");
  require<IoError>(sizes == *first, "\"", shown_text(name), "\" is [", listed(sizes, 8), "], in the first file ",
                   *first, "; export both from one model");
}

}  // namespace ds::exported
