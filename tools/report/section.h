// A part of the report: facts with a value for JSON and a text for people.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

namespace ds::tool::report {

struct Fact {
  std::string name;  // key in JSON; in the text with spaces for underscores
  nlohmann::ordered_json value;
  std::vector<std::string> lines;  // below each other
};

class Section {
 public:
  explicit Section(std::string name) : name_(std::move(name)) {}

  void add(const std::string& name, nlohmann::ordered_json value, const std::string& line);
  void add(const std::string& name, nlohmann::ordered_json value, std::vector<std::string> lines);
  // A text that is its own value; an empty one is null, and shown as `otherwise`.
  void add_text(const std::string& name, const std::string& text, const std::string& otherwise = "unknown");

  const std::string& name() const { return name_; }
  const std::vector<Fact>& facts() const { return facts_; }

 private:
  std::string name_;
  std::vector<Fact> facts_;
};

nlohmann::ordered_json to_json(const Section& section);
void print(const Section& section, std::ostream& out);

}  // namespace ds::tool::report
