#include "tools/explained_keys.h"

#include <algorithm>

#include "config/supported.h"
#include "core/text.h"

namespace ds::tool {
namespace {

bool is_known(const std::string& path) {
  static const std::vector<std::string> kKnown = engine::config::known_keys();
  return std::binary_search(kKnown.begin(), kKnown.end(), path);
}

std::string sentence(std::string text) {
  if (!text.empty() && text.back() != '.') text += '.';
  return text;
}

std::string explanation(const std::string& path, const KeyReference& reference) {
  const auto entry = reference.find(path);
  const bool own = entry && entry->path == path;
  const bool refused = entry && !entry->refused.empty();
  if (refused && !own) {
    return cat("A part of ", entry->path, ", which is not in this version; refused: ", sentence(entry->refused));
  }
  if (refused && entry->meaning.empty()) return cat("Not in this version; refused: ", sentence(entry->refused));
  if (entry && entry->without_effect) {
    return own ? "Read and checked; without effect in C++." : cat("A part of ", entry->path, ", which has no effect.");
  }
  if (!own && is_known(path)) return "A key of DeepSpeed's; see configs/README.md.";
  if (!own && entry && !reference.has_below(entry->path)) {  // what that holds is of the file's own
    return cat("A part of ", entry->path, ": ", sentence(entry->meaning));
  }
  if (!own) return "No key of a ds_config: ignored.";
  const std::string without = entry->standard.empty() ? "" : cat(" Without it: ", sentence(entry->standard));
  const std::string limits = refused ? cat(" Refused: ", sentence(entry->refused)) : "";
  const std::string text = cat(sentence(entry->meaning), limits, without);
  return text.starts_with(' ') ? text.substr(1) : text;
}

void explain_object(const std::string& prefix, const nlohmann::ordered_json& written, const KeyReference& reference,
                    std::vector<ExplainedKey>& out) {
  for (const auto& [key, value] : written.items()) {
    const std::string path = cat(prefix, key);
    if (value.is_object() && !value.empty()) {
      explain_object(cat(path, "."), value, reference, out);
    } else {
      out.push_back({path, explanation(path, reference)});
    }
  }
}

}  // namespace

std::vector<ExplainedKey> explain_keys(const nlohmann::ordered_json& written, const KeyReference& reference) {
  std::vector<ExplainedKey> keys;
  explain_object("", written, reference, keys);
  return keys;
}

}  // namespace ds::tool
