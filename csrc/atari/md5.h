// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace beast::atari {

// RFC 1321, in hexadecimal. To know a ROM by, not for anything secret.
inline std::string md5(std::span<const uint8_t> bytes) {
  std::vector<uint8_t> padded(bytes.begin(), bytes.end());
  padded.push_back(0x80);
  while (padded.size() % 64 != 56) padded.push_back(0);
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (int i = 0; i < 8; ++i) padded.push_back(static_cast<uint8_t>(bits >> (8 * i)));

  constexpr int kShifts[4][4] = {
      {7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};
  std::array<uint32_t, 4> sum = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476};
  for (size_t block = 0; block < padded.size(); block += 64) {
    const auto word = [&](int i) {
      const uint8_t* at = &padded[block + 4 * static_cast<size_t>(i)];
      return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 |
             uint32_t{at[3]} << 24;
    };
    auto [a, b, c, d] = sum;
    for (int i = 0; i < 64; ++i) {
      uint32_t mixed = 0;
      int from = 0;
      switch (i / 16) {
        case 0:
          mixed = (b & c) | (~b & d);
          from = i;
          break;
        case 1:
          mixed = (d & b) | (~d & c);
          from = (5 * i + 1) % 16;
          break;
        case 2:
          mixed = b ^ c ^ d;
          from = (3 * i + 5) % 16;
          break;
        default:
          mixed = c ^ (b | ~d);
          from = 7 * i % 16;
      }
      const auto constant =
          static_cast<uint32_t>(std::fabs(std::sin(i + 1.0)) * 0x1p32);
      const uint32_t turned =
          std::rotl(a + mixed + constant + word(from), kShifts[i / 16][i % 4]);
      a = d;
      d = c;
      c = b;
      b += turned;
    }
    sum = {sum[0] + a, sum[1] + b, sum[2] + c, sum[3] + d};
  }
  std::string text;
  for (const uint32_t part : sum) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = part >> (8 * i) & 0xFF;
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
  }
  return text;
}

}  // namespace beast::atari
