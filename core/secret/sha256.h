// SHA-256 (FIPS 180-4) and HMAC with it (RFC 2104), for what proves that a message is of this job. Torch-free.
//
// Written here because no library that the build has offers it, and two short functions of a standard that does not
// change are less to keep than a dependency. Not made for large data.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace ds {

using Sha256Digest = std::array<uint8_t, 32>;

Sha256Digest sha256(std::string_view bytes);
Sha256Digest hmac_sha256(std::string_view key, std::string_view message);

// Lower-case hexadecimal digits.
std::string to_hex_text(const Sha256Digest& digest);

// Takes as long for the last byte as for the first, so that nobody learns how much of a guess was right.
bool equal_in_constant_time(std::string_view one, std::string_view other);

}  // namespace ds
