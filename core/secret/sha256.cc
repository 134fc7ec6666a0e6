#include "core/secret/sha256.h"

#include <bit>
#include <cstddef>

namespace ds {
namespace {

constexpr size_t kBlock = 64;  // bytes
constexpr size_t kRounds = 64;

constexpr std::array<uint32_t, kRounds> kConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

uint32_t big_endian(const char* bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

void take_block(State& state, const char* block) {
  std::array<uint32_t, kRounds> words{};
  for (size_t i = 0; i < 16; ++i) words[i] = big_endian(block + 4 * i);
  for (size_t i = 16; i < kRounds; ++i) {
    const uint32_t early = words[i - 15];
    const uint32_t late = words[i - 2];
    const uint32_t s0 = std::rotr(early, 7) ^ std::rotr(early, 18) ^ (early >> 3);
    const uint32_t s1 = std::rotr(late, 17) ^ std::rotr(late, 19) ^ (late >> 10);
    words[i] = words[i - 16] + s0 + words[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < kRounds; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t first = h + s1 + ((e & f) ^ (~e & g)) + kConstants[i] + words[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t second = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const State mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

}  // namespace

Sha256Digest sha256(std::string_view bytes) {
  std::string padded(bytes);
  padded += '\x80';
  padded.append((2 * kBlock - 8 - padded.size() % kBlock) % kBlock, '\0');
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded += static_cast<char>(bits >> shift);
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  for (size_t at = 0; at < padded.size(); at += kBlock) take_block(state, padded.data() + at);
  Sha256Digest digest{};
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Sha256Digest hmac_sha256(std::string_view key, std::string_view message) {
  const auto text_of = [](const Sha256Digest& digest) { return std::string(digest.begin(), digest.end()); };
  std::string inner = key.size() > kBlock ? text_of(sha256(key)) : std::string(key);
  inner.resize(kBlock, '\0');
  std::string outer = inner;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return sha256(outer + text_of(sha256(inner + std::string(message))));
}

std::string to_hex_text(const Sha256Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

bool equal_in_constant_time(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < one.size(); ++i) difference = difference | static_cast<uint8_t>(one[i] ^ other[i]);
  return difference == 0;
}

}  // namespace ds
