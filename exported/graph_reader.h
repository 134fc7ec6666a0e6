// Reads the graphs of a program: nodes, their operators and arguments, and where each value is used last.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "exported/archive.h"
#include "exported/argument_reader.h"
#include "exported/program.h"

namespace ds::exported {

// Returns the operator "aten.linear.default" that LibTorch, or a library in this process, has registered, or nothing.
// Throws IoError for a text that is no name of an operator.
std::optional<c10::OperatorHandle> registered_operator(const std::string& target);

// Notes for each node the slots that nobody reads after it.
void note_last_uses(Graph& graph);

// Reads the graphs of one program into it.
class GraphReader {
 public:
  // `batch_counts`: names of values in the main graph that count the batches of a BatchNorm. All outlive it.
  GraphReader(const Archive& archive, Program& program, std::string device_type,
              const std::set<std::string>& batch_counts)
      : archive_(archive), program_(program), device_type_(std::move(device_type)), batch_counts_(batch_counts) {}

  // Adds a graph behind those that it has as arguments; returns its index. Throws IoError.
  size_t read(const nlohmann::json& graph);
  // The values of the main graph that a node or an output reads.
  const std::set<std::string>& read_values() const { return read_values_; }

 private:
  class Slots;
  Node read_node(const nlohmann::json& from, const ArgumentContext& context, Slots& slots);
  void find_operator(const nlohmann::json& from, Node& node, const ArgumentContext& context);
  void read_outputs(const nlohmann::json& from, Node& node, Slots& slots) const;
  void note_mode(const std::string& op, const std::string& name, Argument& argument);

  const Archive& archive_;
  Program& program_;
  std::string device_type_;
  const std::set<std::string>& batch_counts_;
  std::set<std::string> read_values_;
  int depth_ = 0;
  bool evaluates_ = false;
};

}  // namespace ds::exported
