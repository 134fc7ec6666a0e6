#include "core/check.h"

namespace ds {

void ensure(bool condition, const char* invariant, std::source_location where) {
  if (!condition) [[unlikely]] {
    throw InternalError(cat("internal error: ", invariant, " does not hold (", where.file_name(), ":", where.line(),
                            "). This is a defect of dsengine, please report it."));
  }
}

}  // namespace ds
