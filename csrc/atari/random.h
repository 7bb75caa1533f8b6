// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "atari/platform.h"

namespace beast::atari {

// The Mersenne twister MT19937, as the C++ standard defines it: plain data, so that a
// machine can be copied with memcpy.
struct Random {
  static constexpr int kSize = 624;
  uint32_t words[kSize];
  int32_t index;
};

BEAST_HD inline void seed_random(Random& random, uint32_t seed) {
  random.words[0] = seed;
  for (int i = 1; i < Random::kSize; ++i) {
    const uint32_t last = random.words[i - 1];
    random.words[i] = 1812433253u * (last ^ (last >> 30)) + static_cast<uint32_t>(i);
  }
  random.index = Random::kSize;
}

BEAST_HD inline uint32_t next_random(Random& random) {
  constexpr int kSize = Random::kSize, kShift = 397;
  if (random.index == kSize) {
    for (int i = 0; i < kSize; ++i) {
      const int next = i + 1 < kSize ? i + 1 : 0;
      const int far = i + kShift < kSize ? i + kShift : i + kShift - kSize;
      const uint32_t y =
          (random.words[i] & 0x80000000u) | (random.words[next] & 0x7FFFFFFFu);
      random.words[i] = random.words[far] ^ (y >> 1) ^ ((y & 1) ? 0x9908B0DFu : 0);
    }
    random.index = 0;
  }
  uint32_t y = random.words[random.index++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9D2C5680u;
  y ^= (y << 15) & 0xEFC60000u;
  return y ^ (y >> 18);
}

}  // namespace beast::atari
