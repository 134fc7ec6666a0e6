// Text in columns, and sizes as people write them.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace ds::checkpoint::tool {

// Prints rows of cells, indented by two; each column is as wide as its widest cell.
void print_columns(const std::vector<std::vector<std::string>>& rows, std::ostream& out);

// The number as text: 1234567 -> "1.2 MB" (powers of 1000).
std::string shown_bytes(int64_t bytes);
// Parses a number of bytes: "5GB" -> 5e9. Units B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB;
// a number without a unit is bytes. Throws ConfigError.
int64_t parsed_bytes(const std::string& text);

}  // namespace ds::checkpoint::tool
