#include "exported/program_part.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/text.h"
#include "exported/graph_reader.h"

namespace ds::exported {
namespace {

class PartMaker {
 public:
  PartMaker(const Program& program, const ValueFacts& facts, const PartSlots& of)
      : program_(program), facts_(facts), of_(of) {}

  Program make() {
    part_.path = program_.path;
    part_.torch_version = program_.torch_version;
    part_.dtype = program_.dtype;
    part_.decomposed = program_.decomposed;
    part_.exported_in_eval = program_.exported_in_eval;
    part_.trains = program_.trains;
    part_.baked_mode = program_.baked_mode;
    const std::set<int> written = written_slots();
    for (const std::vector<int>* const list : {&of_.travelling, &of_.shared}) {
      for (const int slot : *list) {
        // Inputs of a stage are leaves, which autograd does not let anybody change.
        add_input(slot, {.index = part_.inputs.size(), .is_written = written.contains(slot)});
        part_.inputs.push_back(input_of(slot));
      }
    }
    for (const size_t n : of_.nodes) {
      for (const int slot : slots_of(program_.main().nodes[n].arguments)) add_if_lifted(slot);
    }
    for (const int slot : of_.outputs) {
      add_if_lifted(slot);
      part_.user_outputs.push_back(part_.user_outputs.size());
    }
    for (const size_t n : of_.nodes) add_node(program_.main().nodes[n]);
    for (const int slot : of_.outputs) add_output(slot);
    for (const Mutation& mutation : program_.mutations) add_mutation(mutation);
    graph_.slots = slots_.size();
    note_last_uses(graph_);
    part_.graphs.push_back(std::move(graph_));
    return std::move(part_);
  }

 private:
  int renumbered(int slot) {
    return slot < 0 ? slot : slots_.try_emplace(slot, static_cast<int>(slots_.size())).first->second;
  }

  std::set<int> written_slots() const {
    std::set<int> written;
    for (const size_t n : of_.nodes) {
      for (const int slot : of_.travelling) {
        if (facts_.is_written_by(n, facts_.memory(slot))) written.insert(slot);
      }
    }
    return written;
  }

  // An input of the program as it is there; a value that a node makes is known by the node's name alone.
  ExportedInput input_of(int slot) const {
    const int input = facts_.input(slot);
    if (input >= 0) return program_.inputs[program_.sources[static_cast<size_t>(input)].index];
    const Node& maker = program_.main().nodes[static_cast<size_t>(facts_.maker(slot))];
    return {.name = maker.name, .is_tensor = !facts_.is_number(slot)};
  }

  void add_input(int slot, const InputSource& source) {
    graph_.inputs.push_back(renumbered(slot));
    part_.sources.push_back(source);
  }

  void add_if_lifted(int slot) {
    if (facts_.is_lifted(slot)) add_lifted(static_cast<size_t>(facts_.input(slot)));
  }

  // Returns the place of a lifted input of the program among those of the part.
  size_t add_lifted(size_t input) {
    const auto [place, is_new] = lifted_.try_emplace(input, part_.lifted.size());
    if (is_new) {
      const InputSource& source = program_.sources[input];
      add_input(program_.main().inputs[input],
                {.is_lifted = true, .index = place->second, .is_written = source.is_written});
      part_.lifted.push_back(program_.lifted[source.index]);
    }
    return place->second;
  }

  void add_node(const Node& from) {
    Node& node = graph_.nodes.emplace_back(from);
    for (Argument& argument : node.arguments) {
      for (int& slot : argument.slots) slot = renumbered(slot);
      if (argument.kind == Argument::Kind::kGraph) argument.graph = copy_graph(argument.graph);
    }
    for (int& slot : node.outputs) slot = renumbered(slot);
  }

  // Copies a graph that a node runs, behind those that it has as arguments; returns its index.
  size_t copy_graph(size_t index) {
    Graph graph = program_.graphs[index];
    for (Node& node : graph.nodes) {
      for (Argument& argument : node.arguments) {
        if (argument.kind == Argument::Kind::kGraph) argument.graph = copy_graph(argument.graph);
      }
    }
    part_.graphs.push_back(std::move(graph));
    return part_.graphs.size() - 1;
  }

  void add_output(int slot) { graph_.outputs.push_back({.kind = Argument::Kind::kSlot, .slots = {renumbered(slot)}}); }

  void add_mutation(const Mutation& mutation) {
    const Argument& value = program_.main().outputs[mutation.output];
    if (value.kind != Argument::Kind::kSlot) return;
    const int maker = facts_.maker(value.slots[0]);
    if (maker < 0 || !std::binary_search(of_.nodes.begin(), of_.nodes.end(), static_cast<size_t>(maker))) return;
    size_t input = 0;
    while (!program_.sources[input].is_lifted || program_.sources[input].index != mutation.target.index) ++input;
    part_.mutations.push_back(
        {.output = graph_.outputs.size(), .target = {.is_lifted = true, .index = add_lifted(input)}});
    add_output(value.slots[0]);
  }

  const Program& program_;
  const ValueFacts& facts_;
  const PartSlots& of_;
  Program part_;
  Graph graph_;
  std::map<int, int> slots_;         // from the program's to the part's
  std::map<size_t, size_t> lifted_;  // from inputs of the program to Program::lifted of the part
};

}  // namespace

Program part_of(const Program& program, const ValueFacts& facts, const PartSlots& slots) {
  return PartMaker(program, facts, slots).make();
}

}  // namespace ds::exported
