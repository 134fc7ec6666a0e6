// What is known of the values of an exported graph before it runs: what makes each, whether it depends on labels or on
// anything but inputs and constants, which may share memory, and what is changed in place.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "exported/program.h"

namespace ds::exported {

// The slots that a node or an output reads, sorted, each once.
std::vector<int> slots_of(const std::vector<Argument>& arguments);

// Facts about the values of the main graph of a program, by slot.
class ValueFacts {
 public:
  // `labels`: names of inputs.
  ValueFacts(const Program& program, const std::vector<std::string>& labels);

  int maker(int slot) const { return makers_[static_cast<size_t>(slot)]; }  // a node; -1: an input of the graph
  // The input of the graph that the value is; -1: a node makes it.
  int input(int slot) const { return inputs_[static_cast<size_t>(slot)]; }
  bool is_lifted(int slot) const;
  bool is_number(int slot) const { return numbers_[static_cast<size_t>(slot)]; }
  // Whether it is computed from inputs and constants alone, always to the same values, and changed by nobody.
  bool is_free(int slot) const { return free_[static_cast<size_t>(slot)]; }
  // Whether the node, or the value, depends on a label; a label does.
  bool needs_label(size_t node) const { return labelled_[node]; }
  bool is_labelled(int slot) const { return slot_labelled_[static_cast<size_t>(slot)]; }
  // Values that may share memory have one class. Whether the node changes it in place.
  int memory(int slot) const;
  bool is_written_by(size_t node, int memory) const { return written_by_[node].contains(memory); }
  bool is_writer(size_t node) const { return !written_by_[node].empty(); }

 private:
  void note_inputs(const std::vector<std::string>& labels);
  void note_memory();
  void note_node(size_t index);
  void join(int a, int b);
  bool changes_any(const Node& node) const;
  bool runs_alike(const Node& node) const;

  const Program& program_;
  std::vector<int> makers_, inputs_;
  std::vector<bool> numbers_, free_, slot_labelled_, labelled_;
  std::vector<int> parents_;               // of classes of memory
  std::vector<std::set<int>> written_by_;  // by node
  std::set<int> written_;
};

}  // namespace ds::exported
