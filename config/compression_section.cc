#include "dsengine/config_training.h"

#include "config/describe.h"

namespace ds::engine::config {
namespace {

const JsonFields::Names<CompressionMethod>& method_names() {
  static const JsonFields::Names<CompressionMethod> kNames = {
      {"none", CompressionMethod::kNone},     {"fp16", CompressionMethod::kFloat16},
      {"bf16", CompressionMethod::kBFloat16}, {"int8", CompressionMethod::kInt8},
      {"top_k", CompressionMethod::kTopK},    {"power_sgd", CompressionMethod::kPowerSgd},
      {"sign", CompressionMethod::kSign}};
  return kNames;
}

}  // namespace

const char* name_of(CompressionMethod method) {
  for (const auto& [name, value] : method_names()) {
    if (value == method) return name.c_str();
  }
  return "";
}

void describe(JsonFields& json, GradientCompressionSection& s) {
  json.enumerator("method", s.method, method_names());
  json.field("top_k", s.top_k, {.minimum = 0, .maximum = 1, .open_minimum = true});
  json.field("rank", s.rank, above(0));
  json.field("start_step", s.start_step, at_least(0));
  json.field("error_feedback", s.error_feedback);
  json.field("between_nodes_only", s.between_nodes_only);
}

}  // namespace ds::engine::config
