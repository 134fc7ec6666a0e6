// An exported program as the interpreter runs it: every operator found, every constant made.
//
// A graph has slots, one for each value that a node or the caller puts there. A node is a handle, its arguments, the
// slots of its outputs, and the slots that it is the last to use, which are emptied after it: memory is that of the
// same model written in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/exported_model.h"
#include "exported/size_expression.h"

namespace ds::exported {

// An argument of a node: a constant, values in slots, or a graph.
struct Argument {
  enum class Kind : uint8_t {
    kConstant,
    kSlot,
    kWrappedNumber,    // the number in a slot as a tensor that does not count for the result's dtype
    kTensors,          // lists: of slots, and of `values` where a slot is -1
    kOptionalTensors,  // a slot of -1 is no tensor
    kInts,
    kFloats,
    kDevice,  // the device of the model
    kGraph,
  };
  Kind kind = Kind::kConstant;
  c10::IValue constant = {};                // of kConstant: the value that was exported
  std::optional<c10::IValue> in_eval = {};  // of kConstant: the value in eval(), where a mode decides it
  std::vector<int> slots = {};
  bool empties_slot = false;  // of kSlot: nobody reads the slot after it
  std::vector<c10::IValue> values = {};
  size_t graph = 0;  // of kGraph: an index in Program::graphs
};

// A function of numbers, as Python's operator module has it: sizes are computed by these.
using NumberFunction = c10::IValue (*)(const std::vector<c10::IValue>& numbers);

struct Node {
  enum class Kind : uint8_t { kOperator, kNumbers, kSetGrad, kAutocast, kCond };
  Kind kind = Kind::kOperator;
  std::optional<c10::OperatorHandle> op = {};
  NumberFunction function = nullptr;
  std::vector<Argument> arguments = {};
  std::vector<int> outputs = {};  // -1: nobody uses it
  bool has_list_output = false;   // one list of tensors, whose elements are `outputs`
  bool counts_batches = false;    // BatchNorm's count of batches, left out in eval()
  std::vector<int> last_uses = {};
  // For messages: "linear", "aten.linear.default", "h.0.attn.qkv", the last line of Python.
  std::string name = {};
  std::string target = {};
  std::string module = {};
  std::string source = {};
};

// A graph: the model's, or one that an operator of higher order runs.
struct Graph {
  std::vector<int> inputs = {};  // -1: nobody uses it
  std::vector<Argument> outputs = {};
  std::vector<Node> nodes = {};
  size_t slots = 0;
};

// A tensor of the program that no caller gives.
struct LiftedTensor {
  enum class Kind : uint8_t { kParameter, kBuffer, kNonPersistent, kConstant };
  Kind kind = Kind::kParameter;
  std::string name;
  at::Tensor value = {};  // shares its identity with the module's
};

// The source of an input of the main graph: a tensor of the program, or an input of the caller.
struct InputSource {
  bool is_lifted = false;
  size_t index = 0;         // in Program::lifted, or in Program::inputs
  bool is_written = false;  // by one of Program::mutations
};

// An output of the main graph that is written to a tensor after the run.
struct Mutation {
  size_t output = 0;
  InputSource target;
};

struct Program {
  std::string path;
  std::string torch_version;
  std::vector<Graph> graphs;  // those that others have as arguments before them; the last one is the main graph
  std::vector<LiftedTensor> lifted;
  std::vector<ExportedInput> inputs;
  std::map<std::string, SizeExpression> expressions;  // by ExportedSize::symbol, of those that are no plain symbols
  std::vector<InputSource> sources;                   // of each input of the main graph
  std::vector<Mutation> mutations;
  std::vector<size_t> user_outputs;  // of the outputs of the main graph
  std::shared_ptr<const std::vector<std::string>> output_names;
  at::ScalarType dtype = at::kFloat;  // of the first floating-point parameter, when it was exported

  bool decomposed = false;        // by run_decompositions(): its mode cannot be changed
  bool exported_in_eval = false;  // has operators with a mode, and all of them evaluate
  bool trains = false;            // has operators with a mode that train
  bool baked_mode = false;        // runs as it was exported in train() and eval()

  const Graph& main() const { return graphs.back(); }
};

// Says which node an error is about: `node "linear" (aten.linear.default, in module "h.0.fc")`.
std::string node_in_words(const Node& node);
// The line of Python that made the node, to be put behind a message; empty: the file does not say.
std::string line_in_python(const Node& node);

// Says which node reads a parameter or buffer first, "aten.linear.default in module "h.0.fc", in Python: File ...".
// `names`: all that the tensor has. Empty: none does.
std::string first_reader(const Program& program, const std::vector<std::string>& names);

}  // namespace ds::exported
