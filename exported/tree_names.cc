#include "exported/tree_names.h"

#include "core/json/json_depth.h"
#include "core/text.h"

namespace ds::exported {
namespace {

using nlohmann::json;

const json kNothing = json();

const json& member(const json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object.at(key) : kNothing;
}

json parsed(const std::string& text) {
  const auto value = parse_shallow_json<json>(text);
  return value.is_discarded() ? json() : value;
}

// The first list of `count` texts in a value; contexts of containers have the names of their fields somewhere.
std::vector<std::string> names_in(const json& value, size_t count) {
  if (value.is_array() && value.size() == count && !value.empty()) {
    std::vector<std::string> names;
    for (const json& one : value) {
      if (one.is_string()) names.push_back(one.get<std::string>());
    }
    if (names.size() == count) return names;
  }
  if (value.is_structured()) {
    for (const json& one : value) {
      if (std::vector<std::string> names = names_in(one, count); !names.empty()) return names;
    }
  }
  return {};
}

// The names of the children of a container, numbers where it has none.
std::vector<std::string> children_names(const json& tree, size_t count) {
  const json& context = member(tree, "context");
  std::vector<std::string> names = names_in(context.is_string() ? parsed(context.get<std::string>()) : context, count);
  for (size_t i = names.size(); i < count; ++i) names.push_back(cat(i));
  return names;
}

void add_leaves(const json& tree, const std::string& name, std::vector<std::string>& leaves) {
  if (member(tree, "type").is_null()) {
    leaves.push_back(name);
    return;
  }
  const json& children = member(tree, "children_spec");
  const std::vector<std::string> names = children_names(tree, children.size());
  for (size_t i = 0; i < children.size(); ++i) {
    add_leaves(children[i], name.empty() ? names[i] : cat(name, ".", names[i]), leaves);
  }
}

// The tree behind the version of the text.
json tree_of(const std::string& spec) {
  json value = parsed(spec);
  return value.is_array() && value.size() == 2 ? value[1] : json();
}

}  // namespace

std::vector<std::string> input_names(const std::string& spec, const std::vector<std::string>& arguments) {
  const json tree = tree_of(spec);
  const json& both = member(tree, "children_spec");
  std::vector<std::string> leaves;
  if (!both.is_array() || both.size() != 2) return leaves;
  const json& positional = member(both[0], "children_spec");
  for (size_t i = 0; i < positional.size(); ++i) {
    add_leaves(positional[i], i < arguments.size() ? arguments[i] : cat(i), leaves);
  }
  if (!member(both[1], "type").is_null()) add_leaves(both[1], "", leaves);
  return leaves;
}

std::vector<std::string> output_names(const std::string& spec) {
  const json tree = tree_of(spec);
  std::vector<std::string> leaves;
  if (tree.is_object()) add_leaves(tree, "", leaves);
  if (leaves.size() == 1 && leaves[0].empty()) leaves[0] = "0";
  return leaves;
}

}  // namespace ds::exported
