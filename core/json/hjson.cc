#include "core/json/hjson.h"

#include <utility>

#include "core/check.h"
#include "core/json/hjson_text.h"

namespace ds {
namespace {

using nlohmann::ordered_json;

constexpr int kMaxDepth = 200;

std::string escape_pointer(const std::string& key) {
  std::string out;
  for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return out;
}

class Reader {
 public:
  Reader(std::string_view text, const std::string& name) : text_(text, name) {}

  HjsonDocument read() {
    text_.skip_space_and_comments();
    if (text_.at_end()) {
      document_.root = ordered_json::object();
    } else if (text_.peek() == '{' || text_.peek() == '[') {
      document_.root = read_value("");
    } else {
      document_.root = read_members("", text_.position(), false);
    }
    text_.skip_space_and_comments();
    if (!text_.at_end()) text_.fail(text_.position(), cat("expected the end of the file, found ", text_.found()));
    return std::move(document_);
  }

 private:
  ordered_json read_value(const std::string& pointer) {
    const char c = text_.peek();
    if (c == '"' || (c == '\'' && !text_.starts_with("'''"))) return text_.read_quoted();
    if (c == '\'') return text_.read_multiline();
    if (c != '{' && c != '[') return text_.read_quoteless();
    const size_t begin = text_.position();
    if (++depth_ > kMaxDepth) text_.fail(begin, cat("expected at most ", kMaxDepth, " nested objects and lists"));
    text_.advance();
    ordered_json value = c == '{' ? read_members(pointer, begin, true) : read_items(pointer, begin);
    --depth_;
    return value;
  }

  ordered_json read_members(const std::string& pointer, size_t begin, bool braces) {
    ordered_json object = ordered_json::object();
    std::map<std::string, std::vector<int>> key_lines;
    for (text_.skip_space_and_comments(); braces ? text_.peek() != '}' : !text_.at_end(); separate()) {
      if (text_.at_end()) {
        text_.fail(text_.position(),
                   cat("the object that begins in line ", text_.line_of(begin), " is not closed by '}'"));
      }
      const int line = text_.line();
      const std::string key = text_.read_key();
      const std::string child = pointer + "/" + escape_pointer(key);
      text_.skip_space_and_comments();
      if (text_.peek() != ':') {
        text_.fail(text_.position(), cat("expected ':' after the key \"", key, "\", found ", text_.found()));
      }
      text_.advance();
      text_.skip_space_and_comments();
      document_.lines[child] = line;
      key_lines[key].push_back(line);
      object[key] = read_value(child);
    }
    if (braces) text_.advance();
    for (const auto& [key, lines] : key_lines) {
      if (lines.size() > 1) document_.duplicates.push_back({pointer + "/" + escape_pointer(key), lines});
    }
    return object;
  }

  ordered_json read_items(const std::string& pointer, size_t begin) {
    ordered_json list = ordered_json::array();
    for (text_.skip_space_and_comments(); text_.peek() != ']'; separate()) {
      if (text_.at_end()) {
        text_.fail(text_.position(),
                   cat("the list that begins in line ", text_.line_of(begin), " is not closed by ']'"));
      }
      const std::string child = pointer + "/" + std::to_string(list.size());
      document_.lines[child] = text_.line();
      list.push_back(read_value(child));
    }
    text_.advance();
    return list;
  }

  // Between two members: one comma, or none.
  void separate() {
    text_.skip_space_and_comments();
    if (text_.peek() == ',') {
      text_.advance();
      text_.skip_space_and_comments();
    }
  }

  HjsonText text_;
  HjsonDocument document_;
  int depth_ = 0;
};

}  // namespace

int HjsonDocument::line_of(const std::string& pointer) const {
  const auto found = lines.find(pointer);
  return found == lines.end() ? 0 : found->second;
}

HjsonDocument parse_hjson(std::string_view text, const std::string& name) { return Reader(text, name).read(); }

}  // namespace ds
