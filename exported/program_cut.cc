#include "exported/program_cut.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/ascii.h"
#include "core/check.h"
#include "core/listed.h"
#include "exported/program_part.h"
#include "exported/value_facts.h"

namespace ds::exported {
namespace {

constexpr size_t kMostListed = 10;

bool is_number_text(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), is_ascii_digit);
}

// The lists of modules around a path: of "model.layers.0.mlp.1" "model.layers.*" and "model.layers.0.mlp.*". A module
// that is called again has its path with "@1" behind it.
std::vector<std::pair<std::string, std::string>> blocks_around(const std::string& path) {
  std::vector<std::pair<std::string, std::string>> result;  // list, block
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string part = path.substr(begin, std::min(path.find('@', begin), end) - begin);
    if (begin > 0 && is_number_text(part)) result.emplace_back(path.substr(0, begin) + "*", path.substr(0, end));
    begin = end + 1;
  }
  return result;
}

// Which block of the list each module is in.
class Blocks {
 public:
  Blocks(const Graph& graph, const std::string& wanted, const std::string& path) : list_(wanted) {
    std::map<std::string, size_t> nodes;
    for (const Node& node : graph.nodes) {
      for (const auto& [list, block] : blocks_around(node.module)) ++nodes[list];
    }
    std::vector<std::string> known;
    size_t most = 0;
    for (const auto& [list, count] : nodes) {
      known.push_back(list);
      if (wanted.empty() && count > std::exchange(most, std::max(most, count))) list_ = list;
    }
    require(
        !known.empty(), path, ": has no list of modules (\"layers.0\", \"layers.1\") between which a pipeline could ",
        "be cut: make its blocks a torch.nn.ModuleList or Sequential in Python, or train it without pipeline.stages");
    require(nodes.contains(list_), path, ": has no list of modules \"", wanted, "\"; expected one of ",
            listed(known, kMostListed));
  }

  const std::string& list() const { return list_; }
  std::string block_of(const std::string& module) const {
    for (const auto& [list, block] : blocks_around(module)) {
      if (list == list_) return block;
    }
    return {};
  }

 private:
  std::string list_;
};

class ProgramCutter {
 public:
  ProgramCutter(const Program& program, const CutOptions& options)
      : program_(program),
        options_(options),
        nodes_(program.main().nodes),
        facts_(program, options.labels),
        blocks_(program.main(), options.blocks, program.path) {}

  CutProgram cut() {
    require_inputs();
    assign_layers();
    move_to_loss();
    find_shared();
    find_live();
    require_cuts();
    CutProgram result;
    result.shared =
        part_of(program_, facts_,
                {.nodes = nodes_of(kShared), .travelling = shared_inputs_, .shared = {}, .outputs = shared_values_});
    for (size_t j = 0; j < names_.size(); ++j) result.layers.push_back(make_layer(j));
    result.layers.front().program.expressions = program_.expressions;  // of its inputs, which are those of the program
    result.loss = make_layer(names_.size());
    for (const auto& [slot, name] : outputs_) {
      (facts_.is_labelled(slot) ? result.loss_names : result.output_names).push_back(name);
    }
    return result;
  }

 private:
  static constexpr size_t kShared = SIZE_MAX;

  size_t loss() const { return names_.size(); }
  bool is_label(int slot) const { return facts_.maker(slot) < 0 && facts_.is_labelled(slot); }
  const std::string& name_of(size_t layer) const {
    static const std::string kLoss = "the loss";
    return layer == loss() ? kLoss : names_[layer];
  }
  std::string in_words(int slot) const {
    const int input = facts_.input(slot);
    if (facts_.maker(slot) >= 0) {
      const Node& node = nodes_[static_cast<size_t>(facts_.maker(slot))];
      return cat("what ", node_in_words(node), " makes");
    }
    const InputSource& source = program_.sources[static_cast<size_t>(input)];
    return cat('"', source.is_lifted ? program_.lifted[source.index].name : program_.inputs[source.index].name, '"');
  }
  std::string line_of(int slot) const {
    return facts_.maker(slot) < 0 ? std::string() : line_in_python(nodes_[static_cast<size_t>(facts_.maker(slot))]);
  }

  void require_inputs() {
    for (const std::string& label : options_.labels) {
      const bool known = std::any_of(program_.inputs.begin(), program_.inputs.end(), [&](const ExportedInput& input) {
        return input.name == label && input.is_tensor;
      });
      std::vector<std::string> names;
      for (const ExportedInput& input : program_.inputs) names.push_back(input.name);
      require(known, program_.path, ": labels: has no input \"", label, "\"; expected some of ", listed(names, 20));
    }
    for (const Mutation& mutation : program_.mutations) {
      require(mutation.target.is_lifted, program_.path, ": changes its input \"",
              lazy([&] { return program_.inputs[mutation.target.index].name; }),
              "\", which a pipeline cannot: return the new values in Python");
    }
    for (size_t i = 0; i < program_.user_outputs.size(); ++i) {
      const Argument& output = program_.main().outputs[program_.user_outputs[i]];
      if (output.kind != Argument::Kind::kSlot) continue;  // a constant, which everybody knows
      const int slot = output.slots[0];
      require(!facts_.is_number(slot), program_.path, ": the output \"", (*program_.output_names)[i],
              "\" is a number, which does not come out of a pipeline; return a tensor in Python");
      outputs_.emplace_back(slot, (*program_.output_names)[i]);
    }
  }

  // Layers in the order of nodes; nodes that need a label are the loss.
  void assign_layers() {
    size_t last_block = 0;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (!blocks_.block_of(nodes_[n].module).empty()) last_block = n;
    }
    std::string current;
    const auto begin = [&](const std::string& name, const std::string& of_block) {
      const auto times = std::count_if(names_.begin(), names_.end(), [&](const std::string& one) {
        return one == name || one.starts_with(name + "#");
      });
      names_.push_back(times == 0 ? name : cat(name, '#', times + 1));
      block_of_.push_back(of_block);
    };
    layer_of_.resize(nodes_.size());
    bool is_behind = false;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const std::string block = blocks_.block_of(nodes_[n].module);
      if (!block.empty() && block != current) {
        begin(block, block);
        current = block;
      } else if (names_.empty()) {
        begin(cat("before ", blocks_.list()), "");
      } else if (n > last_block && !is_behind && !facts_.needs_label(n)) {
        begin(cat("behind ", blocks_.list()), "");
        is_behind = true;
      }
      layer_of_[n] = names_.size() - 1;
    }
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (facts_.needs_label(n)) layer_of_[n] = loss();
    }
  }

  bool reads_trained(size_t n) const {
    const std::vector<int> slots = slots_of(nodes_[n].arguments);
    return std::any_of(slots.begin(), slots.end(),
                       [&](int slot) { return facts_.is_lifted(slot) && !facts_.is_free(slot); });
  }

  // What stands directly before the loss and is read by nothing else is computed there: less travels.
  void move_to_loss() {
    std::vector<std::set<size_t>> readers(program_.main().slots);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      for (const int slot : slots_of(nodes_[n].arguments)) readers[static_cast<size_t>(slot)].insert(n);
    }
    for (const auto& [slot, name] : outputs_) readers[static_cast<size_t>(slot)].insert(SIZE_MAX);
    const auto is_of_loss = [&](size_t reader) { return reader != SIZE_MAX && layer_of_[reader] == loss(); };
    for (size_t n = nodes_.size(); n-- > 0;) {
      const Node& node = nodes_[n];
      if (layer_of_[n] == loss()) {
        require(!reads_trained(n), program_.path, ": labels: ", node_in_words(node), " depends on ",
                listed(options_.labels, kMostListed), " and reads a parameter or buffer, so that it is no loss: leave ",
                "the input out of the labels, and it travels with the others", line_in_python(node));
        continue;
      }
      bool moves = !node.outputs.empty() && !reads_trained(n) && !facts_.is_writer(n);
      for (const int output : node.outputs) {
        if (output < 0) continue;
        const auto& of = readers[static_cast<size_t>(output)];
        moves = moves && !of.empty() && std::all_of(of.begin(), of.end(), is_of_loss);
      }
      if (moves) layer_of_[n] = loss();
    }
  }

  // Values that depend on inputs alone and that another layer than their own reads, with all that leads to them.
  void find_shared() {
    std::vector<int> wanted;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      for (const int slot : slots_of(nodes_[n].arguments)) {
        const int maker = facts_.maker(slot);
        if (maker < 0 || !facts_.is_free(slot) || layer_of_[static_cast<size_t>(maker)] == layer_of_[n]) continue;
        wanted.push_back(slot);
      }
    }
    while (!wanted.empty()) {
      const int slot = wanted.back();
      wanted.pop_back();
      const int maker = facts_.maker(slot);
      if (maker < 0) {
        if (!facts_.is_lifted(slot)) shared_inputs_.push_back(slot);
        continue;
      }
      if (layer_of_[static_cast<size_t>(maker)] == kShared) continue;
      layer_of_[static_cast<size_t>(maker)] = kShared;
      const std::vector<int> before = slots_of(nodes_[static_cast<size_t>(maker)].arguments);
      wanted.insert(wanted.end(), before.begin(), before.end());
    }
    sort_once(shared_inputs_);
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (layer_of_[n] == kShared) continue;
      for (const int slot : slots_of(nodes_[n].arguments)) {
        if (is_shared(slot)) shared_values_.push_back(slot);
      }
    }
    for (const auto& [slot, name] : outputs_) {
      if (is_shared(slot)) shared_values_.push_back(slot);
    }
    sort_once(shared_values_);
  }

  bool is_shared(int slot) const {
    return facts_.maker(slot) >= 0 && layer_of_[static_cast<size_t>(facts_.maker(slot))] == kShared;
  }
  static void sort_once(std::vector<int>& slots) {
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  }
  std::vector<size_t> nodes_of(size_t layer) const {
    std::vector<size_t> result;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      if (layer_of_[n] == layer) result.push_back(n);
    }
    return result;
  }

  // The slots that a layer reads beside what its own nodes make; the last one also returns outputs of forward.
  std::set<int> reads_of(size_t layer) const {
    std::set<int> reads;
    for (const size_t n : nodes_of(layer)) {
      for (const int slot : slots_of(nodes_[n].arguments)) reads.insert(slot);
    }
    for (const auto& [slot, name] : outputs_) {
      if ((facts_.is_labelled(slot) ? loss() : loss() - 1) == layer) reads.insert(slot);
    }
    std::erase_if(reads, [&](int slot) {
      return facts_.maker(slot) >= 0 && layer_of_[static_cast<size_t>(facts_.maker(slot))] == layer;
    });
    return reads;
  }

  int slot_of_label(const std::string& name) const {
    for (size_t i = 0; i < program_.sources.size(); ++i) {
      const InputSource& source = program_.sources[i];
      if (!source.is_lifted && program_.inputs[source.index].name == name) return program_.main().inputs[i];
    }
    return -1;
  }

  // What travels to each layer, and to the loss.
  void find_live() {
    live_.resize(loss() + 1);
    std::set<int> live;
    for (size_t j = loss() + 1; j-- > 0;) {
      const std::set<int> reads = reads_of(j);
      std::erase_if(live, [&](int slot) {
        return facts_.maker(slot) >= 0 && layer_of_[static_cast<size_t>(facts_.maker(slot))] == j;
      });
      for (const int slot : reads) {
        if (is_shared(slot)) {
          live.insert(shared_inputs_.begin(), shared_inputs_.end());
        } else if (!facts_.is_lifted(slot) && !is_label(slot)) {
          live.insert(slot);
        }
      }
      live_[j].assign(live.begin(), live.end());
    }
    // Behind the last layer the outputs of forward come first. Before the first one are all inputs that the graph has
    // but for labels, in Python's order.
    std::vector<int> returned;
    for (const auto& [slot, name] : outputs_) {
      if (!facts_.is_labelled(slot)) returned.push_back(slot);
    }
    for (const int slot : live_[loss()]) {
      if (std::find(returned.begin(), returned.end(), slot) == returned.end()) returned.push_back(slot);
    }
    live_[loss()] = returned;
    live_[0].clear();
    for (size_t i = 0; i < program_.sources.size(); ++i) {
      const InputSource& source = program_.sources[i];
      const int slot = program_.main().inputs[i];
      if (source.is_lifted || !program_.inputs[source.index].is_tensor || slot < 0 || is_label(slot)) continue;
      live_[0].push_back(slot);
    }
  }

  void require_cuts() const {
    std::map<int, size_t> owner;  // by class of memory of a lifted tensor
    std::set<int> several;
    for (size_t j = 0; j <= loss(); ++j) {
      for (const int slot : reads_of(j)) {
        if (!facts_.is_lifted(slot) || owner.emplace(facts_.memory(slot), j).first->second == j) continue;
        several.insert(slot);
        require(!program_.sources[static_cast<size_t>(facts_.input(slot))].is_written, program_.path, ": ", name_of(j),
                " reads ", in_words(slot),
                ", which the program changes, as a layer before it does, each a copy of it; ",
                "make it a buffer of one block in Python");
      }
      for (const int slot : live_[j]) {
        require(!facts_.is_number(slot), program_.path, ": ", name_of(j), " needs the number ", in_words(slot),
                ", which is computed from parameters in a layer before it: numbers do not travel between layers of a ",
                "pipeline. Make it a tensor in Python, or compute it in each block", line_of(slot));
      }
    }
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const size_t layer = layer_of_[n];
      if (layer == kShared) continue;
      for (const int slot : several) {
        require(!facts_.is_written_by(n, facts_.memory(slot)), program_.path, ": ", node_in_words(nodes_[n]),
                " changes ", in_words(slot),
                ", which several layers of the pipeline read, each a copy of it; make it a buffer of ",
                "one block in Python", line_in_python(nodes_[n]));
      }
      const auto is_written = [&](int slot) { return facts_.is_written_by(n, facts_.memory(slot)); };
      require(std::count_if(live_[layer].begin(), live_[layer].end(), is_written) <= 1, program_.path, ": ",
              node_in_words(nodes_[n]), " changes memory in place that two values share which travel to ",
              name_of(layer), "; write it without a change in place in Python", line_in_python(nodes_[n]));
    }
  }

  ProgramPart make_layer(size_t j) const {
    ProgramPart part;
    part.name = name_of(j);
    if (j < loss()) part.block = block_of_[j];
    std::vector<int> travelling = live_[j];
    std::vector<int> outputs;
    if (j < loss()) {
      outputs = live_[j + 1];
    } else {
      for (const std::string& label : options_.labels) travelling.push_back(slot_of_label(label));
      for (const auto& [slot, name] : outputs_) {
        if (facts_.is_labelled(slot)) outputs.push_back(slot);
      }
    }
    std::set<int> shared;
    for (const int slot : reads_of(j)) {
      if (is_shared(slot)) shared.insert(slot);
    }
    const auto place_in = [](const std::vector<int>& slots, int slot) {
      return static_cast<size_t>(std::find(slots.begin(), slots.end(), slot) - slots.begin());
    };
    for (const int slot : shared) part.shared.push_back(place_in(shared_values_, slot));
    for (const int slot : shared.empty() ? std::vector<int>() : shared_inputs_) {
      part.shared_from.push_back(place_in(travelling, slot));
    }
    part.travelling = travelling.size();
    part.program = part_of(
        program_, facts_,
        {.nodes = nodes_of(j), .travelling = travelling, .shared = {shared.begin(), shared.end()}, .outputs = outputs});
    return part;
  }

  const Program& program_;
  const CutOptions& options_;
  const std::vector<Node>& nodes_;
  const ValueFacts facts_;
  const Blocks blocks_;
  std::vector<std::string> names_;                    // of layers
  std::vector<std::string> block_of_;                 // of each layer; empty: it stands before or behind the blocks
  std::vector<size_t> layer_of_;                      // of each node; the number of layers: the loss
  std::vector<int> shared_inputs_, shared_values_;    // slots
  std::vector<std::vector<int>> live_;                // slots that travel to each layer, and to the loss
  std::vector<std::pair<int, std::string>> outputs_;  // of forward: slot, name
};

}  // namespace

CutProgram cut(const Program& program, const CutOptions& options) { return ProgramCutter(program, options).cut(); }

}  // namespace ds::exported
