#include "core/json/json_convert.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "core/ascii.h"
#include "core/shown_text.h"
#include "core/text.h"

namespace ds {
namespace {

using nlohmann::ordered_json;

constexpr double kInt64Limit = 9223372036854775808.0;  // 2^63
constexpr size_t kShownCharacters = 80;

std::string_view digits_of(std::string_view text) {
  while (!text.empty() && is_ascii_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_ascii_space(text.back())) text.remove_suffix(1);
  if (text.starts_with('+')) text.remove_prefix(1);
  return text;
}

template <class T>
bool parse_whole(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool whole_to_int(double number, int64_t& out) {
  if (std::trunc(number) != number || number < -kInt64Limit || number >= kInt64Limit) return false;
  out = static_cast<int64_t>(number);
  return true;
}

}  // namespace

bool convert(const ordered_json& value, bool& out) {
  if (value.is_boolean()) {
    out = value.get<bool>();
    return true;
  }
  if (value.is_number() && (value == 0 || value == 1)) {
    out = value == 1;
    return true;
  }
  if (!value.is_string()) return false;
  const std::string word = ascii_lower(value.get<std::string>());
  static const std::array<std::string_view, 6> kTrue = {"true", "yes", "on", "t", "y", "1"};
  static const std::array<std::string_view, 6> kFalse = {"false", "no", "off", "f", "n", "0"};
  const bool is_true = std::find(kTrue.begin(), kTrue.end(), word) != kTrue.end();
  if (!is_true && std::find(kFalse.begin(), kFalse.end(), word) == kFalse.end()) return false;
  out = is_true;
  return true;
}

bool convert(const ordered_json& value, int64_t& out) {
  if (value.is_boolean()) {
    out = value.get<bool>() ? 1 : 0;
    return true;
  }
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
  if (value.is_number_integer()) {
    out = value.get<int64_t>();
    return true;
  }
  if (value.is_number_float()) return whole_to_int(value.get<double>(), out);
  if (!value.is_string()) return false;
  const std::string text = value.get<std::string>();
  std::string_view digits = digits_of(text);
  const size_t point = digits.find('.');
  if (point != std::string_view::npos && point > 0) {
    if (digits.find_first_not_of('0', point + 1) != std::string_view::npos) return false;
    digits = digits.substr(0, point);
  }
  return parse_whole(digits, out);
}

bool convert(const ordered_json& value, double& out) {
  double number = 0;
  if (value.is_boolean()) {
    number = value.get<bool>() ? 1 : 0;
  } else if (value.is_number()) {
    number = value.get<double>();
  } else if (!value.is_string() || !parse_whole(digits_of(value.get_ref<const std::string&>()), number)) {
    return false;
  }
  if (!std::isfinite(number)) return false;
  out = number;
  return true;
}

bool convert(const ordered_json& value, std::string& out) {
  if (!value.is_string()) return false;
  out = value.get<std::string>();
  return true;
}

bool convert(const ordered_json& value, ordered_json& out) {
  out = value;
  return true;
}

std::string shown(const ordered_json& value) {
  return shown_text(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace), kShownCharacters);
}

std::string quoted_list(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += cat(text.empty() ? "\"" : ", \"", word, "\"");
  return text;
}

}  // namespace ds
