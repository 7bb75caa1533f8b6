// SPDX-License-Identifier: Apache-2.0
// From screens of colour numbers to observations: grey or one colour channel, the
// maximum of two frames, and the area resize of OpenCV (INTER_AREA), byte for byte.
//
// OpenCV sums in float32, first along each row, then over the rows, a product and a sum
// at a time, and rounds half to even. So do we: a fused multiply-add would round once
// less, hence -ffp-contract=off where this is compiled.
//
// A screen has many rows that repeat the row above. These are found first and neither
// converted nor summed again, which changes no byte.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "atari/machine.h"
#include "atari/palette.h"
#include "atari/platform.h"

#if defined(BEAST_X86_SIMD)
#include <immintrin.h>
#endif

namespace beast::atari {

// What the code may use of the processor, from the plainest on.
enum class ResizeSimd { kPlain, kAvx2, kAvx512 };

inline ResizeSimd best_resize_simd() {
#if defined(BEAST_X86_SIMD)
  if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return ResizeSimd::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return ResizeSimd::kAvx2;
#endif
  return ResizeSimd::kPlain;
}

// How one side of a picture is resized: output i is the sum over t of weights[i][t] *
// input[first[i] + t]. Outputs with fewer inputs have weights of 0 at the end.
struct AreaTaps {
  int count = 0;  // Of taps, for every output.
  std::vector<int> first;
  std::vector<std::vector<float>> weights;
};

inline AreaTaps area_taps(int source, int target) {
  AreaTaps taps;
  const double scale = static_cast<double>(source) / target;
  for (int i = 0; i < target; ++i) {
    const double begin = i * scale, end = begin + scale;
    const double cell = std::min(scale, source - begin);
    int whole_begin = static_cast<int>(std::ceil(begin));
    int whole_end = std::min(static_cast<int>(std::floor(end)), source - 1);
    whole_begin = std::min(whole_begin, whole_end);
    std::vector<float> weights;
    int first = whole_begin;
    if (whole_begin - begin > 1e-3) {
      first = whole_begin - 1;
      weights.push_back(static_cast<float>((whole_begin - begin) / cell));
    }
    for (int s = whole_begin; s < whole_end; ++s) {
      weights.push_back(static_cast<float>(1.0 / cell));
    }
    if (end - whole_end > 1e-3) {
      const double part = std::min(std::min(end - whole_end, 1.0), cell);
      weights.push_back(static_cast<float>(part / cell));
    }
    taps.count = std::max(taps.count, static_cast<int>(weights.size()));
    taps.first.push_back(first);
    taps.weights.push_back(std::move(weights));
  }
  for (auto& weights : taps.weights) weights.resize(taps.count, 0.0f);
  return taps;
}

// Turns two screens of one height into one plane of an observation. Read-only once
// made, for any number of threads; each brings a Scratch of its own.
class Preprocessor {
 public:
  enum class Channel { kGrey, kRed, kGreen, kBlue };
  // Whether two frames are converted and then compared, as by AtariVectorEnv, or
  // compared channel by channel and then made grey, as by the wrappers of 2015.
  enum class Maximum { kOfGrey, kOfRgb };
  struct Scratch {
    std::vector<float> sums;
    std::vector<uint8_t> row;
  };

  // Throws std::invalid_argument.
  Preprocessor(int source_height, bool pal, int height, int width, Channel channel,
               Maximum maximum, ResizeSimd simd)
      : source_height_(source_height),
        height_(height),
        width_(width),
        maximum_(maximum),
        // Its table has no room for PAL's odd numbers.
        simd_(pal ? std::min(simd, ResizeSimd::kAvx2) : simd),
        shift_(pal ? 0 : 1) {
    if (height < 1 || width < 1 || height > source_height || width > kWidth) {
      throw std::invalid_argument("observations of " + std::to_string(height) + " x " +
                                  std::to_string(width) + ": expected 1 x 1 to " +
                                  std::to_string(source_height) + " x 160");
    }
    const bool whole = source_height % height == 0 && kWidth % width == 0;
    if (whole && (height < source_height || width < kWidth)) {
      throw std::invalid_argument(
          "observations of " + std::to_string(height) + " x " + std::to_string(width) +
          " divide the screen without a remainder, which OpenCV sums in another way; "
          "use another size, or engine=\"ale\"");
    }
    if (maximum == Maximum::kOfRgb && channel != Channel::kGrey) {
      throw std::invalid_argument("the maximum of RGB goes with grey observations");
    }
    const int count = 256 >> shift_;
    std::vector<std::array<uint8_t, 3>> rgb(count);
    for (int i = 0; i < count; ++i) {
      const int number = i << shift_;
      const uint32_t color = color_of(number, pal);
      rgb[i] = {static_cast<uint8_t>(color >> 16), static_cast<uint8_t>(color >> 8),
                static_cast<uint8_t>(color)};
      table_[i] = channel != Channel::kGrey ? rgb[i][static_cast<int>(channel) - 1]
                  : maximum == Maximum::kOfRgb
                      ? grey_of(rgb[i][0], rgb[i][1], rgb[i][2])
                      : screen_grey_of(number, pal);
    }
    if (maximum == Maximum::kOfRgb) {
      of_pair_.resize(count * count);
      for (int i = 0; i < count; ++i) {
        for (int j = 0; j < count; ++j) {
          of_pair_[count * i + j] =
              grey_of(std::max(rgb[i][0], rgb[j][0]), std::max(rgb[i][1], rgb[j][1]),
                      std::max(rgb[i][2], rgb[j][2]));
        }
      }
    }
    rows_ = area_taps(source_height, height);
    columns_ = area_taps(kWidth, width);
    lay_out_columns();
  }

  int height() const { return height_; }
  int width() const { return width_; }
  int source_height() const { return source_height_; }
  ResizeSimd simd() const { return simd_; }

  Scratch make_scratch() const {
    return {std::vector<float>(static_cast<size_t>(num_slots()) * padded_width_),
            std::vector<uint8_t>(kWidth + 64)};
  }

  // The plane [height, width] of latest, or of the maximum of both screens where older
  // is given. What was resized, [source_height, kWidth], is left in pooled.
  void run(const uint8_t* older, const uint8_t* latest, uint8_t* pooled, uint8_t* plane,
           Scratch& scratch) const {
    if (!older) older = latest;
#if defined(BEAST_X86_SIMD)
    if (simd_ == ResizeSimd::kAvx512) {
      // With the number of taps known the compiler unrolls their loops.
      if (columns_.count == 3) {
        return run_avx512<3>(older, latest, pooled, plane, scratch);
      }
      return run_avx512<0>(older, latest, pooled, plane, scratch);
    }
#endif
    resize(plane, scratch, [&](int y, float* sums) {
      const size_t at = static_cast<size_t>(y) * kWidth;
      const uint8_t* a = older + at;
      return convert_row(a, latest + at, y > 0, pooled + at, sums, scratch.row.data());
    });
  }

  // pooled becomes the maximum of itself and screen, and plane what that is resized.
  void add(const uint8_t* screen, uint8_t* pooled, uint8_t* plane,
           Scratch& scratch) const {
    for (int i = 0; i < source_height_ * kWidth; ++i) {
      pooled[i] = std::max(pooled[i], table_[screen[i] >> shift_]);
    }
    resize(plane, scratch, [&](int y, float* sums) {
      sum_columns(pooled + static_cast<size_t>(y) * kWidth, sums);
      return true;
    });
  }

 private:
  static constexpr int kLanes = 16;

  int num_slots() const { return rows_.count + 2; }

  // make_sums(y, sums) gives false if row y is the row before it; sums stays untouched.
  template <class MakeSums>
  void resize(uint8_t* plane, Scratch& scratch, MakeSums make_sums) const {
    const int slots = num_slots();
    int next_row = 0, slot = -1;
    std::array<const float*, kMaxHeight> sums_of;
    for (int i = 0; i < height_; ++i) {
      const int first = rows_.first[i];
      const int end = std::min(first + rows_.count, source_height_);
      for (; next_row < end; ++next_row) {
        const int next_slot = slot + 1 == slots ? 0 : slot + 1;
        float* sums =
            scratch.sums.data() + static_cast<size_t>(next_slot) * padded_width_;
        if (make_sums(next_row, sums)) slot = next_slot;
        sums_of[next_row] =
            scratch.sums.data() + static_cast<size_t>(slot) * padded_width_;
      }
      add_rows(&sums_of[first], rows_.weights[i].data(), end - first,
               plane + static_cast<size_t>(i) * width_);
    }
  }

  // The columns' taps as the vector code wants them: a vector of outputs at a time.
  void lay_out_columns() {
    padded_width_ = (width_ + kLanes - 1) / kLanes * kLanes;
    const int taps = columns_.count;
    weights_.assign(static_cast<size_t>(taps) * padded_width_, 0.0f);
    for (int x = 0; x < width_; ++x) {
      for (int t = 0; t < taps; ++t) {
        weights_[static_cast<size_t>(t) * padded_width_ + x] = columns_.weights[x][t];
      }
    }
    const auto source_of = [&](int x, int t) {
      return std::min(columns_.first[std::min(x, width_ - 1)] + t, kWidth - 1);
    };
    if (simd_ == ResizeSimd::kAvx512) {
      // A row is three vectors of 64; each 16 outputs take from two neighbours of them.
      const int vectors = padded_width_ / kLanes;
      upper_pair_.resize(vectors);
      indices_.assign(static_cast<size_t>(vectors) * taps * 64, 0);
      for (int v = 0; v < vectors; ++v) {
        const int lowest = source_of(v * kLanes, 0);
        const int highest = source_of(v * kLanes + kLanes - 1, taps - 1);
        upper_pair_[v] = highest >= 128;
        if (upper_pair_[v] && lowest < 64)
          simd_ = ResizeSimd::kAvx2;  // A narrow picture.
        for (int t = 0; t < taps; ++t) {
          for (int lane = 0; lane < kLanes; ++lane) {
            indices_[(static_cast<size_t>(v) * taps + t) * 64 + 4 * lane] =
                static_cast<uint8_t>(source_of(v * kLanes + lane, t) -
                                     64 * upper_pair_[v]);
          }
        }
      }
    }
    if (simd_ == ResizeSimd::kAvx2) {
      // Four outputs take from 16 neighbouring inputs.
      const int quads = padded_width_ / 4;
      offsets_.resize(quads);
      indices_.assign(static_cast<size_t>(quads) * taps * 16, 0x80);  // 0x80 gives 0.
      for (int q = 0; q < quads; ++q) {
        offsets_[q] = source_of(4 * q, 0);
        if (source_of(4 * q + 3, taps - 1) - offsets_[q] > 15)
          simd_ = ResizeSimd::kPlain;
        for (int t = 0; t < taps; ++t) {
          for (int lane = 0; lane < 4; ++lane) {
            indices_[((static_cast<size_t>(q / 2) * taps + t) * 2 + q % 2) * 16 +
                     4 * lane] =
                static_cast<uint8_t>(source_of(4 * q + lane, t) - offsets_[q]);
          }
        }
      }
    }
  }

  uint8_t of_two(uint8_t a, uint8_t b) const {
    const int i = a >> shift_, j = b >> shift_;
    if (maximum_ == Maximum::kOfRgb) return of_pair_[(256 >> shift_) * i + j];
    return std::max(table_[i], table_[j]);
  }

  // One row: its bytes to pooled, its sums to sums. False if both screens repeat the
  // row above there; then only pooled is written.
  bool convert_row(const uint8_t* a, const uint8_t* b, bool has_above, uint8_t* pooled,
                   float* sums, uint8_t* row) const {
    if (has_above && std::memcmp(b, b - kWidth, kWidth) == 0 &&
        (a == b || std::memcmp(a, a - kWidth, kWidth) == 0)) {
      std::memcpy(pooled, pooled - kWidth, kWidth);
      return false;
    }
    if (a == b || std::memcmp(a, b, kWidth) == 0) {
      for (int x = 0; x < kWidth; ++x) row[x] = table_[b[x] >> shift_];
    } else {
      for (int x = 0; x < kWidth; ++x) row[x] = of_two(a[x], b[x]);
    }
    std::memcpy(pooled, row, kWidth);
#if defined(BEAST_X86_SIMD)
    if (simd_ == ResizeSimd::kAvx2) {
      sum_columns_avx2(row, sums);
      return true;
    }
#endif
    sum_columns(row, sums);
    return true;
  }

  void sum_columns(const uint8_t* row, float* sums) const {
    for (int x = 0; x < width_; ++x) {
      const uint8_t* source = row + columns_.first[x];
      const float* weights = columns_.weights[x].data();
      const int taps = std::min(columns_.count, kWidth - columns_.first[x]);
      float sum = static_cast<float>(source[0]) * weights[0];
      for (int t = 1; t < taps; ++t) sum += static_cast<float>(source[t]) * weights[t];
      sums[x] = sum;
    }
  }

  void add_rows(const float* const* sums, const float* weights, int count,
                uint8_t* plane) const {
#if defined(BEAST_X86_SIMD)
    if (simd_ != ResizeSimd::kPlain) return add_rows_avx2(sums, weights, count, plane);
#endif
    for (int x = 0; x < width_; ++x) {
      float sum = sums[0][x] * weights[0];
      for (int t = 1; t < count; ++t) sum += sums[t][x] * weights[t];
      plane[x] = round_to_byte(sum);
    }
  }

  // Half to even; adding 2^23 leaves no bits for a fraction.
  static uint8_t round_to_byte(float value) {
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(value + 8388608.0f));
  }

#if defined(BEAST_X86_SIMD)
  __attribute__((target("avx2"))) void sum_columns_avx2(const uint8_t* row,
                                                        float* sums) const {
    const int taps = columns_.count;
    const uint8_t* indices = indices_.data();
    for (int x = 0; x < padded_width_; x += 8) {
      const auto load = [](const uint8_t* from) __attribute__((target("avx2"))) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      };
      const __m256i source = _mm256_set_m128i(load(row + offsets_[x / 4 + 1]),
                                              load(row + offsets_[x / 4]));
      __m256 sum = _mm256_setzero_ps();
      for (int t = 0; t < taps; ++t, indices += 32) {
        const __m256i index =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices));
        const __m256 value = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(source, index));
        const __m256 weight =
            _mm256_loadu_ps(&weights_[static_cast<size_t>(t) * padded_width_ + x]);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, weight));
      }
      _mm256_storeu_ps(sums + x, sum);
    }
  }

  __attribute__((target("avx2"))) void add_rows_avx2(const float* const* sums,
                                                     const float* weights, int count,
                                                     uint8_t* plane) const {
    for (int x = 0; x < width_; x += 8) {
      __m256 sum =
          _mm256_mul_ps(_mm256_loadu_ps(sums[0] + x), _mm256_set1_ps(weights[0]));
      for (int t = 1; t < count; ++t) {
        const __m256 row = _mm256_loadu_ps(sums[t] + x);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(row, _mm256_set1_ps(weights[t])));
      }
      const __m256i whole = _mm256_cvtps_epi32(sum);
      const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole),
                                             _mm256_extracti128_si256(whole, 1));
      const __m128i packed = _mm_packus_epi16(words, words);
      if (x + 8 <= width_) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(plane + x), packed);
      } else {
        uint8_t bytes[16];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), packed);
        std::memcpy(plane + x, bytes, width_ - x);
      }
    }
  }

  // run() as one function, which keeps the row above in registers.
  template <int kTaps>
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi"))) void run_avx512(
      const uint8_t* older, const uint8_t* latest, uint8_t* pooled, uint8_t* plane,
      Scratch& scratch) const {
    constexpr __mmask64 kParts[3] = {~0ull, ~0ull, 0xFFFFFFFFull};  // 64 + 64 + 32.
    const int taps = kTaps ? kTaps : columns_.count;
    const int slots = num_slots();
    const __m512i low = _mm512_loadu_si512(table_);
    const __m512i high = _mm512_loadu_si512(table_ + 64);
    __m512i a[3], b[3], bytes[3];
    std::array<const float*, kMaxHeight> sums_of;
    float* sums = scratch.sums.data();
    int row = 0, slot = 0;
    for (int i = 0; i < height_; ++i) {
      const int first = rows_.first[i];
      const int end = std::min(first + rows_.count, source_height_);
      for (; row < end; ++row) {
        const uint8_t* from_a = older + row * kWidth;
        const uint8_t* from_b = latest + row * kWidth;
        uint8_t* to = pooled + row * kWidth;
        uint64_t changed = row == 0, moved = 0;
        for (int k = 0; k < 3; ++k) {
          const __m512i new_a = _mm512_maskz_loadu_epi8(kParts[k], from_a + 64 * k);
          const __m512i new_b = _mm512_maskz_loadu_epi8(kParts[k], from_b + 64 * k);
          if (row > 0) {
            changed |= _mm512_cmpneq_epi8_mask(new_a, a[k]);
            changed |= _mm512_cmpneq_epi8_mask(new_b, b[k]);
          }
          moved |= _mm512_cmpneq_epi8_mask(new_a, new_b);
          a[k] = new_a;
          b[k] = new_b;
        }
        if (changed) {
          for (int k = 0; k < 3; ++k) {
            // Numbers of colours are even, so that no bit crosses into another byte.
            bytes[k] = _mm512_permutex2var_epi8(low, _mm512_srli_epi16(b[k], 1), high);
            if (moved && maximum_ == Maximum::kOfGrey) {
              const __m512i other =
                  _mm512_permutex2var_epi8(low, _mm512_srli_epi16(a[k], 1), high);
              bytes[k] = _mm512_max_epu8(bytes[k], other);
            }
          }
          if (moved && maximum_ == Maximum::kOfRgb) {
            alignas(64) uint8_t of_both[192];
            for (int x = 0; x < kWidth; ++x) of_both[x] = of_two(from_a[x], from_b[x]);
            for (int k = 0; k < 3; ++k) {
              bytes[k] = _mm512_maskz_loadu_epi8(kParts[k], of_both + 64 * k);
            }
          }
          slot = slot + 1 == slots ? 0 : slot + 1;
          sums = scratch.sums.data() + slot * padded_width_;
          const uint8_t* indices = indices_.data();
          for (int x = 0; x < padded_width_; x += kLanes) {
            const bool upper = upper_pair_[x / kLanes];
            const __m512i lower_bytes = upper ? bytes[1] : bytes[0];
            const __m512i upper_bytes = upper ? bytes[2] : bytes[1];
            __m512 sum = _mm512_setzero_ps();
            for (int t = 0; t < taps; ++t, indices += 64) {
              const __m512i value = _mm512_maskz_permutex2var_epi8(
                  0x1111111111111111ull, lower_bytes, _mm512_loadu_si512(indices),
                  upper_bytes);
              sum = _mm512_add_ps(
                  sum,
                  _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xFFFF, value),
                                _mm512_loadu_ps(&weights_[t * padded_width_ + x])));
            }
            _mm512_storeu_ps(sums + x, sum);
          }
        }
        for (int k = 0; k < 3; ++k) {
          _mm512_mask_storeu_epi8(to + 64 * k, kParts[k], bytes[k]);
        }
        sums_of[row] = sums;
      }
      const float* weights = rows_.weights[i].data();
      uint8_t* to = plane + i * width_;
      for (int x = 0; x < width_; x += kLanes) {
        __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(sums_of[first] + x),
                                   _mm512_set1_ps(weights[0]));
        for (int t = 1; t < end - first; ++t) {
          const __m512 values = _mm512_loadu_ps(sums_of[first + t] + x);
          sum = _mm512_add_ps(sum, _mm512_mul_ps(values, _mm512_set1_ps(weights[t])));
        }
        const auto lanes =
            static_cast<__mmask16>((1u << std::min(width_ - x, kLanes)) - 1);
        _mm512_mask_cvtusepi32_storeu_epi8(to + x, lanes,
                                           _mm512_maskz_cvtps_epi32(0xFFFF, sum));
      }
    }
  }
#endif

  int source_height_, height_, width_;
  Maximum maximum_;
  ResizeSimd simd_;
  int shift_;  // From a colour number to its place in the tables; NTSC has even ones.
  AreaTaps rows_, columns_;
  int padded_width_ = 0;            // To whole vectors.
  alignas(64) uint8_t table_[256];  // Of colour numbers.
  std::vector<uint8_t> of_pair_;    // The same of two, for kOfRgb.
  std::vector<float> weights_;      // [taps, padded_width_], of the columns.
  std::vector<uint8_t> indices_;    // Which bytes go to which lanes.
  std::vector<uint8_t> upper_pair_;
  std::vector<int> offsets_;
};

}  // namespace beast::atari
