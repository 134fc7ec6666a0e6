#include "core/json/hjson.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/json/hjson_scalars.h"
#include "core/json/hjson_text.h"
#include "core/shown_text.h"

namespace ds {
namespace {

using nlohmann::ordered_json;

constexpr int kMaxDepth = 200;

// The keys of one object: where each stands in it, and its lines in the text.
struct Key {
  std::ptrdiff_t index = 0;
  std::vector<int> lines;
};
using Keys = std::unordered_map<std::string, Key>;

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
    if (c == '"' || (c == '\'' && !text_.starts_with("'''"))) return scalars_.read_quoted();
    if (c == '\'') return scalars_.read_multiline();
    if (c != '{' && c != '[') return scalars_.read_quoteless();
    const size_t begin = text_.position();
    if (++depth_ > kMaxDepth) text_.fail(begin, cat("expected at most ", kMaxDepth, " nested objects and lists"));
    text_.advance();
    ordered_json value = c == '{' ? read_members(pointer, begin, true) : read_items(pointer, begin);
    --depth_;
    return value;
  }

  ordered_json read_members(const std::string& pointer, size_t begin, bool braces) {
    ordered_json object = ordered_json::object();
    auto& members = object.get_ref<ordered_json::object_t&>();
    Keys keys;
    for (text_.skip_space_and_comments(); braces ? text_.peek() != '}' : !text_.at_end(); separate()) {
      if (text_.at_end()) fail_unclosed("object", begin, '}');
      const int line = text_.line();
      const std::string key = scalars_.read_key();
      const std::string child = pointer_to_member(pointer, key);
      text_.skip_space_and_comments();
      if (text_.peek() != ':') {
        text_.fail(text_.position(),
                   cat("expected ':' after the key \"", shown_text(key), "\", found ", text_.found()));
      }
      text_.advance();
      text_.skip_space_and_comments();
      document_.lines[child] = line;
      Key& known = keys[key];
      known.lines.push_back(line);
      ordered_json value = read_value(child);
      if (known.lines.size() > 1) {
        (members.begin() + known.index)->second = std::move(value);
      } else {
        known.index = static_cast<std::ptrdiff_t>(members.size());
        // Looking for the key in the object, as object[key] does, would make large objects quadratic.
        members.emplace_back(key, std::move(value));
      }
    }
    if (braces) text_.advance();
    note_duplicates(pointer, keys);
    return object;
  }

  // A key that is there more than once is said by name, in the order of the names.
  void note_duplicates(const std::string& pointer, const Keys& keys) {
    std::vector<DuplicateKey> found;
    for (const auto& [key, known] : keys) {
      if (known.lines.size() > 1) found.push_back({pointer_to_member(pointer, key), known.lines});
    }
    std::sort(found.begin(), found.end(),
              [](const DuplicateKey& a, const DuplicateKey& b) { return a.pointer < b.pointer; });
    document_.duplicates.insert(document_.duplicates.end(), found.begin(), found.end());
  }

  [[noreturn]] void fail_unclosed(const char* what, size_t begin, char close) const {
    const std::string swallowed = scalars_.swallowed();
    text_.fail(text_.position(), cat("the ", what, " that begins in line ", text_.line_of(begin), " is not closed by '",
                                     close, "'", swallowed.empty() ? "" : "; ", swallowed));
  }

  ordered_json read_items(const std::string& pointer, size_t begin) {
    ordered_json list = ordered_json::array();
    for (text_.skip_space_and_comments(); text_.peek() != ']'; separate()) {
      if (text_.at_end()) fail_unclosed("list", begin, ']');
      const std::string child = pointer + "/" + std::to_string(list.size());
      document_.lines[child] = text_.line();
      list.push_back(read_value(child));
    }
    text_.advance();
    return list;
  }

  // Skips what separates two members: one comma, or none.
  void separate() {
    text_.skip_space_and_comments();
    if (text_.peek() == ',') {
      text_.advance();
      text_.skip_space_and_comments();
    }
  }

  HjsonText text_;
  HjsonScalars scalars_{text_};
  HjsonDocument document_;
  int depth_ = 0;
};

}  // namespace

std::string pointer_to_member(const std::string& pointer, const std::string& key) {
  std::string member = pointer + "/";
  for (const char c : key) member += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
  return member;
}

int HjsonDocument::line_of(const std::string& pointer) const {
  const auto found = lines.find(pointer);
  return found == lines.end() ? 0 : found->second;
}

HjsonDocument parse_hjson(std::string_view text, const std::string& name) { return Reader(text, name).read(); }

}  // namespace ds
