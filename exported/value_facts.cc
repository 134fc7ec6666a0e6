#include "exported/value_facts.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <numeric>

namespace ds::exported {
namespace {

// Whether the schema, or a kernel that does not say so, changes an argument in place.
bool writes(const c10::FunctionSchema& schema, size_t argument) {
  const c10::Argument& declared = schema.arguments()[argument];
  if (declared.alias_info() != nullptr && declared.alias_info()->isWrite()) return true;
  const bool keeps_statistics = schema.name() == "aten::batch_norm" || schema.name() == "aten::instance_norm";
  return keeps_statistics && (declared.name() == "running_mean" || declared.name() == "running_var");
}

bool writes_any(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (writes(schema, i)) return true;
  }
  return false;
}

bool returns_number(const Node& node, size_t output) {
  if (node.kind == Node::Kind::kNumbers) return true;
  if (node.kind != Node::Kind::kOperator || output >= node.op->schema().returns().size()) return false;
  const c10::TypeKind kind = node.op->schema().returns()[output].type()->kind();
  return kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType || kind == c10::TypeKind::BoolType ||
         kind == c10::TypeKind::NumberType || kind == c10::TypeKind::SymIntType;
}

}  // namespace

std::vector<int> slots_of(const std::vector<Argument>& arguments) {
  std::set<int> slots;
  for (const Argument& argument : arguments) slots.insert(argument.slots.begin(), argument.slots.end());
  slots.erase(-1);
  return {slots.begin(), slots.end()};
}

ValueFacts::ValueFacts(const Program& program, const std::vector<std::string>& labels) : program_(program) {
  const size_t slots = program.main().slots;
  makers_.resize(slots, -1);
  inputs_.resize(slots, -1);
  numbers_.resize(slots);
  free_.resize(slots);
  slot_labelled_.resize(slots);
  labelled_.resize(program.main().nodes.size());
  written_by_.resize(program.main().nodes.size());
  parents_.resize(slots);
  std::iota(parents_.begin(), parents_.end(), 0);
  note_memory();
  note_inputs(labels);
  for (size_t n = 0; n < program.main().nodes.size(); ++n) note_node(n);
}

bool ValueFacts::is_lifted(int slot) const {
  return input(slot) >= 0 && program_.sources[static_cast<size_t>(input(slot))].is_lifted;
}

int ValueFacts::memory(int slot) const {
  while (parents_[static_cast<size_t>(slot)] != slot) slot = parents_[static_cast<size_t>(slot)];
  return slot;
}

void ValueFacts::join(int a, int b) { parents_[static_cast<size_t>(memory(a))] = memory(b); }

// An operator of higher order may return any of what it is given, and is taken to change all of it if it changes
// anything.
void ValueFacts::note_memory() {
  const std::vector<Node>& nodes = program_.main().nodes;
  std::vector<std::vector<int>> written(nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = nodes[n];
    if (node.kind == Node::Kind::kNumbers) continue;
    const bool is_operator = node.kind == Node::Kind::kOperator;
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      const bool aliases = !is_operator || node.op->schema().arguments()[i].alias_info() != nullptr;
      const bool changes = is_operator ? writes(node.op->schema(), i) : changes_any(node);
      for (const int slot : node.arguments[i].slots) {
        if (slot < 0) continue;
        if (changes) written[n].push_back(slot);
        for (const int output : node.outputs) {
          if (aliases && output >= 0) join(slot, output);
        }
      }
    }
  }
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (const int slot : written[n]) written_by_[n].insert(memory(slot));
    written_.insert(written_by_[n].begin(), written_by_[n].end());
  }
}

void ValueFacts::note_inputs(const std::vector<std::string>& labels) {
  using enum LiftedTensor::Kind;
  for (size_t i = 0; i < program_.sources.size(); ++i) {
    const int slot = program_.main().inputs[i];
    if (slot < 0) continue;
    const auto at = static_cast<size_t>(slot);
    inputs_[at] = static_cast<int>(i);
    const InputSource& source = program_.sources[i];
    const bool changes = source.is_written || written_.contains(memory(slot));
    if (source.is_lifted) {
      const LiftedTensor::Kind kind = program_.lifted[source.index].kind;
      free_[at] = !changes && (kind == kConstant || kind == kNonPersistent);
    } else {
      slot_labelled_[at] = std::find(labels.begin(), labels.end(), program_.inputs[source.index].name) != labels.end();
      free_[at] = !changes && !slot_labelled_[at];
    }
  }
}

void ValueFacts::note_node(size_t index) {
  const Node& node = program_.main().nodes[index];
  bool is_free = runs_alike(node);
  for (const int slot : slots_of(node.arguments)) {
    is_free = is_free && free_[static_cast<size_t>(slot)];
    if (slot_labelled_[static_cast<size_t>(slot)]) labelled_[index] = true;
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] < 0) continue;
    const auto slot = static_cast<size_t>(node.outputs[i]);
    makers_[slot] = static_cast<int>(index);
    numbers_[slot] = returns_number(node, i);
    slot_labelled_[slot] = labelled_[index];
    free_[slot] = is_free && !written_.contains(memory(node.outputs[i]));
  }
}

// Whether the node changes anything in place, in graphs that it runs too.
bool ValueFacts::changes_any(const Node& node) const {
  if (node.kind == Node::Kind::kNumbers) return false;
  if (node.kind == Node::Kind::kOperator) return writes_any(node.op->schema());
  return std::any_of(node.arguments.begin(), node.arguments.end(), [&](const Argument& argument) {
    if (argument.kind != Argument::Kind::kGraph) return false;
    const std::vector<Node>& inner = program_.graphs[argument.graph].nodes;
    return std::any_of(inner.begin(), inner.end(), [&](const Node& one) { return changes_any(one); });
  });
}

// Whether the node gives the same results for the same values in every run and mode, and changes nothing.
bool ValueFacts::runs_alike(const Node& node) const {
  if (node.kind == Node::Kind::kNumbers) return true;
  if (node.kind == Node::Kind::kOperator) {
    const bool has_mode = node.counts_batches || std::any_of(node.arguments.begin(), node.arguments.end(),
                                                             [](const Argument& one) { return one.in_eval; });
    return !has_mode && !writes_any(node.op->schema()) && !node.op->hasTag(at::Tag::nondeterministic_seeded);
  }
  return std::all_of(node.arguments.begin(), node.arguments.end(), [&](const Argument& argument) {
    if (argument.kind != Argument::Kind::kGraph) return true;
    const std::vector<Node>& inner = program_.graphs[argument.graph].nodes;
    return std::all_of(inner.begin(), inner.end(), [&](const Node& one) { return runs_alike(one); });
  });
}

}  // namespace ds::exported
