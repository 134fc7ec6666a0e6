#include "dsengine/layer_spec.h"

#include <c10/util/Type.h>

#include "core/check.h"

namespace ds::pipeline::internal {

std::string type_name(const std::type_info& type) {
  std::string name = c10::demangle(type.name());
  constexpr std::string_view kImpl = "Impl";
  if (name.size() > kImpl.size() && name.ends_with(kImpl)) name.resize(name.size() - kImpl.size());
  return name;
}

void throw_arity(size_t found) {
  throw UsageError(cat("takes another number of tensors than the ", found,
                       " that it is given; what a layer returns is ", "what the next one takes"));
}

}  // namespace ds::pipeline::internal
