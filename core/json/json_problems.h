// Collects everything that is wrong with a JSON document, to report it at once. Torch-free.
#pragma once

#include <string>
#include <vector>

#include "core/check.h"
#include "core/json/hjson.h"

namespace ds {

// "/zero_optimization/stage" -> "zero_optimization.stage", "/a/b/0" -> "a.b.0".
std::string dotted_path(const std::string& pointer);

// `document` outlives it.
class JsonProblems {
 public:
  explicit JsonProblems(const HjsonDocument& document) : document_(document) {}

  // `message` says the value found, the rule and the fix; the path and line are put before it.
  void error(const std::string& pointer, const std::string& message);
  void warning(const std::string& pointer, const std::string& message);

  bool has_errors() const { return !errors_.empty(); }
  const std::vector<std::string>& errors() const { return errors_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Throws ConfigError with all errors, one line each, after a line that begins with `name`.
  void throw_errors(const std::string& name) const;

  // "optimizer.params.lr (line 7)".
  std::string place(const std::string& pointer) const;

 private:
  const HjsonDocument& document_;
  std::vector<std::string> errors_;
  std::vector<std::string> warnings_;
};

}  // namespace ds
