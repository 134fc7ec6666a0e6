#include "exported/graph_reader.h"

#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "core/check.h"
#include "core/shown_text.h"
#include "core/without_stack.h"
#include "exported/number_functions.h"

namespace ds::exported {
namespace {

using nlohmann::json;

// Arguments that say whether the model trains, which export has written down as constants.
struct ModeArgument {
  std::string_view op;  // without its overload
  std::string_view argument;
};
constexpr std::array<ModeArgument, 15> kModes = {{{"aten::dropout", "train"},
                                                  {"aten::dropout_", "train"},
                                                  {"aten::feature_dropout", "train"},
                                                  {"aten::feature_dropout_", "train"},
                                                  {"aten::alpha_dropout", "train"},
                                                  {"aten::alpha_dropout_", "train"},
                                                  {"aten::feature_alpha_dropout", "train"},
                                                  {"aten::native_dropout", "train"},
                                                  {"aten::rrelu", "training"},
                                                  {"aten::rrelu_", "training"},
                                                  {"aten::batch_norm", "training"},
                                                  {"aten::lstm", "train"},
                                                  {"aten::gru", "train"},
                                                  {"aten::rnn_tanh", "train"},
                                                  {"aten::rnn_relu", "train"}}};

// An operator that runs graphs.
struct HigherOrder {
  Node::Kind kind;
  size_t arguments;            // at least
  std::vector<size_t> graphs;  // which of them are graphs
};

// Returns nothing for a target that is no operator of higher order. Throws IoError for one that is not run.
std::optional<HigherOrder> higher_order(const std::string& target) {
  if (!target.starts_with("higher_order.")) return std::nullopt;
  if (target == "higher_order.wrap_with_set_grad_enabled") return HigherOrder{Node::Kind::kSetGrad, 2, {1}};
  if (target == "higher_order.wrap_with_autocast") return HigherOrder{Node::Kind::kAutocast, 5, {4}};
  if (target == "higher_order.cond") return HigherOrder{Node::Kind::kCond, 3, {1, 2}};
  throw IoError(
      "this operator of higher order cannot be trained; supported are cond, torch.no_grad() and "
      "torch.enable_grad() blocks, and torch.autocast blocks. Write the model without it in Python");
}

void add_arguments(const json& from, Node& node, const ArgumentContext& context, size_t least) {
  const json& inputs = from.at("inputs");
  node.arguments.reserve(inputs.size());
  for (const json& in : inputs) node.arguments.push_back(read_argument(in.at("arg"), context, nullptr));
  require<IoError>(node.arguments.size() >= least, "has ", node.arguments.size(), " arguments, expected ", least);
}

std::string_view after(std::string_view text, std::string_view start) {
  return text.starts_with(start) ? text.substr(start.size()) : text;
}

// The innermost frame of a stack trace that is not torch's own: `File "model.py", line 19, in forward: return
// self.a(x)`.
std::string last_line(std::string_view stack) {
  constexpr std::string_view kFile = "File \"";
  constexpr size_t kNone = std::string_view::npos;
  const size_t last = stack.rfind(kFile);
  if (last == kNone) return {};
  const auto is_of_torch = [&](size_t frame) {
    return stack.substr(frame, stack.find('\n', frame) - frame).find("/torch/") != kNone;
  };
  size_t frame = last;
  while (is_of_torch(frame) && frame > 0 && stack.rfind(kFile, frame - 1) != kNone) {
    frame = stack.rfind(kFile, frame - 1);
  }
  if (is_of_torch(frame)) frame = last;
  const size_t end = stack.find('\n', frame);
  std::string result(stack.substr(frame, end - frame));
  // The line of code stands below it.
  const size_t code = end == kNone ? end : stack.find_first_not_of(" \n", end);
  if (code != kNone) result.append(": ").append(stack.substr(code, stack.find('\n', code) - code));
  return shown_text(result, kShownLineBytes);
}

// The path of the innermost module around a node: of "L__self__,,Gpt;L__self__h.0,h.0,Block" it is "h.0".
std::string innermost_module(std::string_view stack) {
  constexpr size_t kNone = std::string_view::npos;
  const size_t begin = stack.rfind(';') == kNone ? 0 : stack.rfind(';') + 1;
  const size_t first = stack.find(',', begin);
  const size_t second = first == kNone ? first : stack.find(',', first + 1);
  // Export puts a note of its own in the place of the modules of sizes.
  if (second == kNone || stack.starts_with("_empty_nn_module_stack")) return {};
  return shown_text(stack.substr(first + 1, second - first - 1));
}

// The text under a key, in place; empty: there is none.
std::string_view text_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return {};
  return found->get_ref<const std::string&>();
}

// The name of a value that an argument of a graph's inputs is; empty: it has none.
std::string_view value_name(const json& argument) {
  if (!argument.is_object() || argument.empty()) return {};
  const json& value = argument.begin().value();
  if (!value.is_object()) return {};
  const std::string_view name = text_in(value, "name");
  return name.empty() ? text_in(value, "as_name") : name;
}

}  // namespace

void note_last_uses(Graph& graph) {
  std::unordered_set<int> live;
  for (const Argument& output : graph.outputs) live.insert(output.slots.begin(), output.slots.end());
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    node->last_uses.clear();
    const auto note = [&](int slot) {
      const bool is_last = slot >= 0 && live.insert(slot).second;
      if (is_last) node->last_uses.push_back(slot);
      return is_last;
    };
    for (const int slot : node->outputs) note(slot);
    // From the last argument on, because a node may read one slot several times.
    for (auto argument = node->arguments.rbegin(); argument != node->arguments.rend(); ++argument) {
      bool is_last = false;
      for (const int slot : argument->slots) is_last = note(slot);
      argument->empties_slot = argument->kind == Argument::Kind::kSlot && is_last;
    }
  }
}

std::optional<c10::OperatorHandle> registered_operator(const std::string& target) {
  const size_t first = target.find('.');
  const size_t last = target.rfind('.');
  require<IoError>(first != std::string::npos && last > first, "expected an operator as \"aten.add.Tensor\"");
  const std::string overload = target.substr(last + 1);
  return c10::Dispatcher::singleton().findSchema(
      {cat(target.substr(0, first), "::", target.substr(first + 1, last - first - 1)),
       overload == "default" ? std::string() : overload});
}

// The values of one graph by name, texts of its JSON.
class GraphReader::Slots {
 public:
  explicit Slots(size_t expected) { slots_.reserve(expected); }
  // The slot of a value that is there.
  int find(std::string_view name) const {
    const auto found = slots_.find(name);
    require<IoError>(found != slots_.end(), "the value \"", lazy([&] { return shown_text(name); }),
                     "\" is used before it is made", kDamaged);
    return found->second;
  }
  // A slot for a value that is made.
  int make(std::string_view name) {
    const auto [place, is_new] = slots_.try_emplace(name, static_cast<int>(slots_.size()));
    require<IoError>(is_new, "the value \"", lazy([&] { return shown_text(name); }), "\" is made twice", kDamaged);
    return place->second;
  }
  size_t size() const { return slots_.size(); }

 private:
  std::unordered_map<std::string_view, int> slots_;
};

size_t GraphReader::read(const json& from) {
  ++depth_;  // of graphs in one another, which the depth of the file's JSON bounds
  Graph graph;
  const json& nodes = from.at("nodes");
  Slots slots(from.at("inputs").size() + nodes.size());
  for (const json& input : from.at("inputs")) {
    const std::string_view name = value_name(input);
    graph.inputs.push_back(name.empty() ? -1 : slots.make(name));
  }
  const bool is_main = depth_ == 1;
  ArgumentContext context{.slot =
                              [&, is_main](std::string_view name) {
                                if (is_main) read_values_.insert(name);
                                return slots.find(name);
                              },
                          .graph = [this](const json& inner) { return read(inner); },
                          .device_type = device_type_};
  graph.nodes.reserve(nodes.size());
  for (const json& node : nodes) {
    // What export has checked of its own tensors: wrong as soon as the model is in another precision.
    if (text_in(node, "target") == "torch.ops.aten._assert_tensor_metadata.default") continue;
    graph.nodes.push_back(read_node(node, context, slots));
  }
  context.graph = [](const json& /*inner*/) -> size_t { throw IoError("a graph is an output"); };
  for (const json& output : from.at("outputs")) graph.outputs.push_back(read_argument(output, context, nullptr));
  graph.slots = slots.size();
  note_last_uses(graph);
  --depth_;
  if (is_main) program_.exported_in_eval = evaluates_ && !program_.trains;
  program_.graphs.push_back(std::move(graph));
  return program_.graphs.size() - 1;
}

Node GraphReader::read_node(const json& from, const ArgumentContext& context, Slots& slots) {
  Node node;
  node.target = after(from.at("target").get_ref<const std::string&>(), "torch.ops.");
  node.name = shown_text(text_in(from, "name"));
  const json& metadata = from.at("metadata");
  node.module = innermost_module(text_in(metadata, "nn_module_stack"));
  node.source = last_line(text_in(metadata, "stack_trace"));
  try {
    if (const std::optional<HigherOrder> higher = higher_order(node.target)) {
      node.kind = higher->kind;
      add_arguments(from, node, context, higher->arguments);
      for (const size_t i : higher->graphs) {
        require<IoError>(node.arguments[i].kind == Argument::Kind::kGraph, "argument ", i, " has to be a graph");
      }
    } else if (is_number_function(node.target)) {
      node.kind = Node::Kind::kNumbers;
      node.function = number_function(node.target);
      require<IoError>(node.function != nullptr, "this function of sizes is not known; known are ",
                       known_number_functions());
      add_arguments(from, node, context, 1);
    } else {
      find_operator(from, node, context);
    }
    node.has_list_output = from.at("outputs").size() == 1 && from.at("outputs").at(0).contains("as_tensors");
    read_outputs(from, node, slots);
  } catch (const nlohmann::json::exception&) {
    throw;
  } catch (const std::exception& error) {
    const std::string what = without_stack(error.what());
    if (what.starts_with(archive_.path())) throw;  // a node of an inner graph
    archive_.fail(cat(node_in_words(node), ": ", what, line_in_python(node)));
  }
  return node;
}

GraphReader::Mode GraphReader::mode_of(const std::string& op, const std::string& argument) {
  if (op == "aten::scaled_dot_product_attention" && argument == "dropout_p") return Mode::kAttentionDropout;
  const bool is_flag = std::any_of(kModes.begin(), kModes.end(), [&](const ModeArgument& mode) {
    return op == mode.op && argument == mode.argument;
  });
  return is_flag ? Mode::kFlag : Mode::kNone;
}

const GraphReader::KnownOperator& GraphReader::known_operator(const std::string& target) {
  const auto known = operators_.find(target);
  if (known != operators_.end()) return known->second;
  const std::optional<c10::OperatorHandle> handle = registered_operator(target);
  require<IoError>(handle.has_value(), "LibTorch ", TORCH_VERSION,
                   " has no such operator; the file was written by torch ", shown_text(program_.torch_version),
                   target.starts_with("aten.")
                       ? ". Use a LibTorch that has it, or export the model with an older torch"
                       : ". An operator of a library has to be registered under this name before "
                         "the model is loaded: link the library, or open it with dlopen");
  std::vector<Mode> modes;
  for (const c10::Argument& argument : handle->schema().arguments()) {
    modes.push_back(mode_of(handle->schema().name(), argument.name()));
  }
  return operators_.emplace(target, KnownOperator{*handle, std::move(modes)}).first->second;
}

void GraphReader::find_operator(const json& from, Node& node, const ArgumentContext& context) {
  const KnownOperator& op = known_operator(node.target);
  node.op = op.handle;
  const c10::FunctionSchema& schema = op.handle.schema();
  const std::vector<c10::Argument>& arguments = schema.arguments();
  std::vector<std::pair<std::string_view, const json*>> given;
  for (const json& in : from.at("inputs")) {
    given.emplace_back(in.at("name").get_ref<const std::string&>(), &in.at("arg"));
  }
  node.arguments.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& expected = arguments[i];
    const auto found =
        std::find_if(given.begin(), given.end(), [&](const auto& one) { return one.first == expected.name(); });
    if (found != given.end()) {
      node.arguments.push_back(read_argument(*found->second, context, expected.type().get()));
      given.erase(found);
    } else {
      require<IoError>(expected.default_value().has_value(), "argument \"", expected.name(),
                       "\" is missing; its schema is ", schema);
      node.arguments.push_back({.kind = Argument::Kind::kConstant, .constant = *expected.default_value()});
    }
    note_mode(op.modes[i], node.arguments.back());
  }
  require<IoError>(given.empty(), "argument \"", lazy([&] { return shown_text(given.front().first); }),
                   "\" is there twice, or not known to this LibTorch, ", TORCH_VERSION, "; its schema is ", schema,
                   ". Export the model with that version of torch");
  if (node.target == "aten.add_.Tensor" && depth_ == 1) {
    const json& self = from.at("inputs").at(0).at("arg");
    node.counts_batches = !program_.baked_mode && batch_counts_.contains(std::string(value_name(self)));
  }
}

// Notes whether the operator trained when it was exported, and what it does in eval().
void GraphReader::note_mode(Mode mode, Argument& argument) {
  if (mode == Mode::kNone || argument.kind != Argument::Kind::kConstant) return;
  if (mode == Mode::kAttentionDropout) {
    // Attention without dropout, or in eval(): nobody can tell.
    if (!argument.constant.isDouble() || argument.constant.toDouble() == 0) return;
    program_.trains = true;
    if (!program_.baked_mode) argument.in_eval = 0.0;
    return;
  }
  if (!argument.constant.isBool()) return;
  (argument.constant.toBool() ? program_.trains : evaluates_) = true;
  if (!program_.baked_mode) argument.in_eval = false;
}

void GraphReader::read_outputs(const json& from, Node& node, Slots& slots) const {
  for (const json& output : from.at("outputs")) {
    require<IoError>(output.is_object() && output.size() == 1, "an output has to have one kind");
    if (output.contains("as_tensors")) {
      for (const json& tensor : output.at("as_tensors")) {
        node.outputs.push_back(slots.make(tensor.at("name").get_ref<const std::string&>()));
      }
    } else if (output.contains("as_none")) {
      node.outputs.push_back(-1);
    } else {
      const std::string_view name = value_name(output);
      require<IoError>(!name.empty(), "an output of the kind \"",
                       lazy([&] { return shown_text(output.begin().key()); }), "\" cannot be kept");
      node.outputs.push_back(slots.make(name));
    }
  }
}

}  // namespace ds::exported
