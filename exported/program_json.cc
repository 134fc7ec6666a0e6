#include "exported/program_json.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json/parse_json.h"

namespace ds::exported {
namespace {

using nlohmann::json;

// Objects and arrays of a program, as far as they decide what is kept of those in them.
enum class Part : uint8_t { kOther, kNodes, kMetadata, kValues, kValue };

// The part that a member of an object is.
Part part_of(Part object, std::string_view key) {
  if (object == Part::kValues) return Part::kValue;
  if (object == Part::kNodes) return key == "metadata" ? Part::kMetadata : Part::kOther;
  if (object != Part::kOther) return Part::kOther;
  if (key == "nodes") return Part::kNodes;
  return key == "tensor_values" ? Part::kValues : Part::kOther;
}

bool is_kept(Part object, std::string_view key) {
  if (object == Part::kValue) return key == "dtype" || key == "sizes";
  if (object == Part::kMetadata) return key == "nn_module_stack" || key == "stack_trace";
  return true;
}

// Builds the value of a text from what nlohmann's parser finds in it.
class Builder final : public nlohmann::json_sax<json> {
 public:
  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }
  bool start_object(size_t /*count*/) override { return open(json::object()); }
  bool end_object() override { return close(); }
  bool start_array(size_t /*count*/) override { return open(json::array()); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (skipped_ > 0) return true;
    skips_next_ = !is_kept(open_.back().part, name);
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t /*position*/, const std::string& /*token*/, const json::exception& error) override {
    throw error;
  }

 private:
  // An object or array whose end has not come.
  struct Open {
    json* value;
    Part part;
  };

  template <class Value>
  bool add(Value&& value) {
    if (skipped_ == 0 && !std::exchange(skips_next_, false)) place() = std::forward<Value>(value);
    return true;
  }

  bool open(json&& empty) {
    if (skipped_ > 0 || std::exchange(skips_next_, false)) {
      ++skipped_;
      return true;
    }
    // The elements of an array are what the array is.
    const bool is_member = !open_.empty() && open_.back().value->is_object();
    const Part around = open_.empty() ? Part::kOther : open_.back().part;
    const Part part = is_member ? part_of(around, key_) : around;
    json& value = place();
    value = std::move(empty);
    open_.push_back({&value, part});
    return true;
  }

  bool close() {
    skipped_ > 0 ? static_cast<void>(--skipped_) : open_.pop_back();
    return true;
  }

  // Where the next value goes. Of a key that is there twice, the last value stays.
  json& place() {
    if (open_.empty()) return root_;
    json& around = *open_.back().value;
    return around.is_object() ? around[key_] : around.emplace_back();
  }

  json root_;
  std::vector<Open> open_;
  std::string key_;
  bool skips_next_ = false;  // the value of the key that was read
  int skipped_ = 0;          // objects and arrays around the text that is read, which are not kept
};

}  // namespace

json parse_program(const std::string& text) {
  Builder builder;
  sax_parse_json(text, builder);
  return builder.take();
}

}  // namespace ds::exported
