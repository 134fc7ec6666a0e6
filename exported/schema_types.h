// Numbers of torch/_export/serde/schema.py, whose enumerations are not c10's.
#pragma once

#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace ds::exported {

// Major version of the schema that is read; minor versions only add.
inline constexpr int64_t kSchemaMajor = 8;

// Each throws IoError for a number that is not known, saying which are.
at::ScalarType scalar_type_of(int64_t number);
at::Layout layout_of(int64_t number);
at::MemoryFormat memory_format_of(int64_t number);

}  // namespace ds::exported
