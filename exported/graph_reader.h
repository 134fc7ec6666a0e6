// Reads the graphs of a program: nodes, their operators and arguments, and where each value is used last.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "exported/archive.h"
#include "exported/argument_reader.h"
#include "exported/program.h"

namespace ds::exported {

// Returns the operator "aten.linear.default" that LibTorch, or a library in this process, has registered, or nothing.
// Throws IoError for a text that is no name of an operator.
std::optional<c10::OperatorHandle> registered_operator(const std::string& target);

// Notes for each node the slots that nobody reads after it, and which of its arguments empties one.
void note_last_uses(Graph& graph);

// Reads the graphs of one program into it.
class GraphReader {
 public:
  // `batch_counts`: names of values in the main graph that count the batches of a BatchNorm. All outlive it.
  GraphReader(const Archive& archive, Program& program, std::string device_type,
              const std::set<std::string>& batch_counts)
      : archive_(archive), program_(program), device_type_(std::move(device_type)), batch_counts_(batch_counts) {}

  // Adds a graph behind those that it has as arguments; returns its index. `graph` outlives the reader. Throws IoError.
  size_t read(const nlohmann::json& graph);
  // The values of the main graph that a node or an output reads.
  const std::unordered_set<std::string_view>& read_values() const { return read_values_; }

 private:
  class Slots;
  // The ways in which an argument of an operator shows whether the model was in train() or in eval().
  enum class Mode : uint8_t { kNone, kFlag, kAttentionDropout };
  // An operator of the file, looked up once for all nodes that call it.
  struct KnownOperator {
    c10::OperatorHandle handle;
    std::vector<Mode> modes;  // of each argument of its schema
  };
  const KnownOperator& known_operator(const std::string& target);
  static Mode mode_of(const std::string& op, const std::string& argument);
  Node read_node(const nlohmann::json& from, const ArgumentContext& context, Slots& slots);
  void find_operator(const nlohmann::json& from, Node& node, const ArgumentContext& context);
  void read_outputs(const nlohmann::json& from, Node& node, Slots& slots) const;
  void note_mode(Mode mode, Argument& argument);

  const Archive& archive_;
  Program& program_;
  std::string device_type_;
  const std::set<std::string>& batch_counts_;
  std::unordered_map<std::string, KnownOperator> operators_;
  std::unordered_set<std::string_view> read_values_;  // texts of the JSON
  int depth_ = 0;
  bool evaluates_ = false;
};

}  // namespace ds::exported
