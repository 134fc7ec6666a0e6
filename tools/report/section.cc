#include "tools/report/section.h"

#include <algorithm>
#include <utility>

namespace ds::tool::report {
namespace {

constexpr size_t kNameWidth = 20;

std::string in_words(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

}  // namespace

void Section::add(const std::string& name, nlohmann::ordered_json value, const std::string& line) {
  add(name, std::move(value), std::vector<std::string>{line});
}

void Section::add(const std::string& name, nlohmann::ordered_json value, std::vector<std::string> lines) {
  facts_.push_back({name, std::move(value), std::move(lines)});
}

void Section::add_text(const std::string& name, const std::string& text, const std::string& otherwise) {
  if (text.empty()) return add(name, nullptr, otherwise);
  add(name, text, text);
}

nlohmann::ordered_json to_json(const Section& section) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const Fact& fact : section.facts()) json[fact.name] = fact.value;
  return json;
}

void print(const Section& section, std::ostream& out) {
  out << in_words(section.name()) << '\n';
  for (const Fact& fact : section.facts()) {
    std::string name = in_words(fact.name);
    for (const std::string& line : fact.lines) {
      name.resize(std::max(kNameWidth, name.size() + 1), ' ');
      out << "  " << name << line << '\n';
      name.clear();
    }
  }
}

}  // namespace ds::tool::report
