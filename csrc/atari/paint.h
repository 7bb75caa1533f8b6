// SPDX-License-Identifier: Apache-2.0
// Writes pixels: 64 at a time from one bit mask per layer. Plain code for everywhere,
// and AVX-512 or AVX2 where the processor has them, chosen when the program runs.
#pragma once

#include <cstdint>
#include <cstring>

#include "atari/platform.h"
#if defined(BEAST_X86_SIMD)
#include <immintrin.h>
#endif

namespace beast::atari {

// Up to 64 pixels: where one layer's bit is set it covers what is below it.
struct Layers {
  uint64_t low, middle, high;
};
struct LayerColors {
  uint8_t background, low, middle, high;
};

// Eight bits as eight bytes, 0xFF where the bit is set; bit 0 is the first in memory.
BEAST_HD inline uint64_t spread_to_bytes(uint64_t bits) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  const uint64_t picked = (bits * kOnes) & 0x8040201008040201u;
  return ((((picked & (0x7F * kOnes)) + 0x7F * kOnes) | picked) >> 7 & kOnes) * 0xFF;
}

// Writes those of pixels[0, 64) whose bit in range is set.
BEAST_HD inline void paint_plain(uint8_t* pixels, uint64_t range, const Layers& layers,
                                 const LayerColors& colors) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  for (int i = 0; i < 64; i += 8) {
    const uint64_t in_range = range >> i & 0xFF;
    if (in_range == 0) continue;
    uint64_t eight = colors.background * kOnes;
    const auto cover = [&eight, i](uint64_t layer, uint8_t color) {
      const uint64_t mask = spread_to_bytes(layer >> i & 0xFF);
      eight = (eight & ~mask) | (color * kOnes & mask);
    };
    cover(layers.low, colors.low);
    cover(layers.middle, colors.middle);
    cover(layers.high, colors.high);
    if (in_range == 0xFF) {
      memcpy(pixels + i, &eight, 8);
    } else {
      for (int j = 0; j < 8; ++j) {
        if (in_range >> j & 1) pixels[i + j] = static_cast<uint8_t>(eight >> (8 * j));
      }
    }
  }
}

#if defined(BEAST_X86_SIMD)
__attribute__((target("avx512f,avx512bw"))) inline void paint_avx512(
    uint8_t* pixels, uint64_t range, const Layers& layers, const LayerColors& colors) {
  const char low = static_cast<char>(colors.low);
  const char middle = static_cast<char>(colors.middle);
  const char high = static_cast<char>(colors.high);
  __m512i line = _mm512_set1_epi8(static_cast<char>(colors.background));
  line = _mm512_mask_set1_epi8(line, layers.low, low);
  line = _mm512_mask_set1_epi8(line, layers.middle, middle);
  line = _mm512_mask_set1_epi8(line, layers.high, high);
  _mm512_mask_storeu_epi8(pixels, range, line);
}

// 32 bits as 32 bytes, 0xFF where the bit is set.
__attribute__((target("avx2"))) inline __m256i spread_avx2(uint64_t bits) {
  const __m256i bytes =
      _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)),
                          _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                             0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

__attribute__((target("avx2"))) inline __m256i cover_avx2(__m256i line, uint64_t layer,
                                                          uint8_t color) {
  return _mm256_blendv_epi8(line, _mm256_set1_epi8(static_cast<char>(color)),
                            spread_avx2(layer));
}

__attribute__((target("avx2"))) inline void paint_avx2(uint8_t* pixels, uint64_t range,
                                                       const Layers& layers,
                                                       const LayerColors& colors) {
  for (int i = 0; i < 64; i += 32) {
    const uint64_t in_range = range >> i & 0xFFFFFFFFu;
    if (in_range == 0) continue;
    __m256i line = _mm256_set1_epi8(static_cast<char>(colors.background));
    line = cover_avx2(line, layers.low >> i, colors.low);
    line = cover_avx2(line, layers.middle >> i, colors.middle);
    line = cover_avx2(line, layers.high >> i, colors.high);
    if (in_range == 0xFFFFFFFFu) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pixels + i), line);
      continue;
    }
    alignas(32) uint8_t bytes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), line);
    const int begin = __builtin_ctzll(in_range);
    const int end = 64 - __builtin_clzll(in_range);
    memcpy(pixels + i + begin, bytes + begin, static_cast<size_t>(end - begin));
  }
}

enum class Simd : uint8_t { kPlain, kAvx2, kAvx512 };

inline Simd best_simd() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw")) return Simd::kAvx512;
  return __builtin_cpu_supports("avx2") ? Simd::kAvx2 : Simd::kPlain;
}

// Tests set it, to compare; nothing else does.
inline Simd simd = best_simd();
#endif

// range is one run of set bits.
BEAST_HD inline void paint(uint8_t* pixels, uint64_t range, const Layers& layers,
                           const LayerColors& colors) {
#if defined(BEAST_X86_SIMD)
  if (BEAST_LIKELY(simd == Simd::kAvx512)) {
    paint_avx512(pixels, range, layers, colors);
    return;
  }
  if (simd == Simd::kAvx2) {
    paint_avx2(pixels, range, layers, colors);
    return;
  }
#endif
  paint_plain(pixels, range, layers, colors);
}

}  // namespace beast::atari
