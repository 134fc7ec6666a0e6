// Collects everything that is wrong with a JSON document, to report it at once. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <unordered_set>
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

  // So many errors and warnings are kept; of further ones only the number is told.
  static constexpr size_t kMostLines = 100;

  // `message` says the value found, the rule and the fix; the path and line are put before it.
  void error(const std::string& pointer, const std::string& message);
  void warning(const std::string& pointer, const std::string& message);

  bool has_errors() const { return !errors_.lines.empty(); }
  const std::vector<std::string>& errors() const { return errors_.lines; }
  // The warnings, with a line on those that are left out.
  std::vector<std::string> warnings() const { return warnings_.told("warnings"); }
  // Throws ConfigError with all errors, one line each, after a line that begins with `name`.
  void throw_errors(const std::string& name) const;

  // "optimizer.params.lr (line 7)".
  std::string place(const std::string& pointer) const;

 private:
  class Lines {
   public:
    void add(std::string line);
    size_t count() const { return seen_.size(); }
    std::vector<std::string> told(const char* kind) const;

    std::vector<std::string> lines;

   private:
    std::unordered_set<std::string> seen_;  // each is said once
  };

  const HjsonDocument& document_;
  Lines errors_;
  Lines warnings_;
};

}  // namespace ds
