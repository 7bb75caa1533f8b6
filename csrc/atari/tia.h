// SPDX-License-Identifier: Apache-2.0
// The TIA: picture, collisions, positions and the timing of frames.
//
// Nothing happens clock by clock. A write first draws, with the registers as they were,
// all that lies before it (and a few clocks more, as the register has it), then changes
// the register; a read of a collision draws up to now. Where the picture is not wanted
// only the collisions are computed, and only where they can change.
//
// A line has 228 colour clocks, three per CPU cycle: 68 of blank, then 160 pixels. All
// times count from the beginning of the line in which the frame began.
//
// A frame may also be run in two phases, the idea of CuLE for GPUs: the first runs the
// CPU, computes collisions and notes all accesses in a log, the second draws from the
// log. Threads that draw then do not wait for threads that run a CPU. The log begins
// with the whole state of the TIA, so that frames that nobody draws need none.
#pragma once

#include <cstdint>
#include <cstring>

#include "atari/machine.h"
#include "atari/paint.h"
#include "atari/platform.h"

namespace beast::atari {

inline constexpr int kLineClocks = 228, kLineCycles = 76, kBlankClocks = 68;
inline constexpr int32_t kNever = 0x7FFFFFFF;

enum TiaRegister : uint8_t {
  kVSYNC = 0x00,
  kVBLANK = 0x01,
  kWSYNC = 0x02,
  kNUSIZ0 = 0x04,
  kNUSIZ1 = 0x05,
  kCOLUP0 = 0x06,
  kCOLUP1 = 0x07,
  kCOLUPF = 0x08,
  kCOLUBK = 0x09,
  kCTRLPF = 0x0A,
  kREFP0 = 0x0B,
  kREFP1 = 0x0C,
  kPF0 = 0x0D,
  kPF1 = 0x0E,
  kPF2 = 0x0F,
  kRESP0 = 0x10,
  kRESP1 = 0x11,
  kRESM0 = 0x12,
  kRESM1 = 0x13,
  kRESBL = 0x14,
  kGRP0 = 0x1B,
  kGRP1 = 0x1C,
  kENAM0 = 0x1D,
  kENAM1 = 0x1E,
  kENABL = 0x1F,
  kHMP0 = 0x20,
  kHMP1 = 0x21,
  kHMM0 = 0x22,
  kHMM1 = 0x23,
  kHMBL = 0x24,
  kVDELP0 = 0x25,
  kVDELP1 = 0x26,
  kVDELBL = 0x27,
  kRESMP0 = 0x28,
  kRESMP1 = 0x29,
  kHMOVE = 0x2A,
  kHMCLR = 0x2B,
  kCXCLR = 0x2C
};

// Two bits per collision register, in the order of their addresses: bits 7 and 6 of
// register r are bits 2r + 1 and 2r here.
BEAST_HD constexpr uint16_t collision_bit(int one, int other) {
  const int pair = (1 << one) | (1 << other);
  switch (pair) {
    case (1 << kM0) | (1 << kP1):
      return 1 << 1;
    case (1 << kM0) | (1 << kP0):
      return 1 << 0;
    case (1 << kM1) | (1 << kP0):
      return 1 << 3;
    case (1 << kM1) | (1 << kP1):
      return 1 << 2;
    case (1 << kP0) | (1 << kPf):
      return 1 << 5;
    case (1 << kP0) | (1 << kBl):
      return 1 << 4;
    case (1 << kP1) | (1 << kPf):
      return 1 << 7;
    case (1 << kP1) | (1 << kBl):
      return 1 << 6;
    case (1 << kM0) | (1 << kPf):
      return 1 << 9;
    case (1 << kM0) | (1 << kBl):
      return 1 << 8;
    case (1 << kM1) | (1 << kPf):
      return 1 << 11;
    case (1 << kM1) | (1 << kBl):
      return 1 << 10;
    case (1 << kBl) | (1 << kPf):
      return 1 << 13;
    case (1 << kP0) | (1 << kP1):
      return 1 << 15;
    case (1 << kM0) | (1 << kM1):
      return 1 << 14;
    default:
      return 0;
  }
}

BEAST_HD constexpr uint16_t collisions_among(int objects) {
  int found = 0;
  for (int one = 0; one < kNumObjects; ++one) {
    for (int other = 0; other < one; ++other) {
      if ((objects >> one & 1) && (objects >> other & 1)) {
        found |= collision_bit(one, other);
      }
    }
  }
  return static_cast<uint16_t>(found);
}

struct PossibleCollisions {
  uint16_t among[64] = {};
  constexpr PossibleCollisions() {
    for (int objects = 0; objects < 64; ++objects) {
      among[objects] = collisions_among(objects);
    }
  }
};
inline constexpr PossibleCollisions kPossibleCollisions;

BEAST_HD inline uint16_t possible_collisions(uint8_t objects) {
#if defined(__CUDA_ARCH__)  // Which does not see the host's tables.
  return collisions_among(objects);
#else
  return kPossibleCollisions.among[objects];
#endif
}

// ---- Which pixels an object covers. ----

BEAST_HD inline uint32_t reverse_byte(uint32_t byte) {
  byte = (byte & 0x0F) << 4 | byte >> 4;
  byte = (byte & 0x33) << 2 | (byte >> 2 & 0x33);
  return (byte & 0x55) << 1 | (byte >> 1 & 0x55);
}

// Each of 16 bits as four.
BEAST_HD inline uint64_t widen_by_4(uint64_t bits) {
  bits = (bits | bits << 24) & 0x000000FF000000FFu;
  bits = (bits | bits << 12) & 0x000F000F000F000Fu;
  bits = (bits | bits << 6) & 0x0303030303030303u;
  bits = (bits | bits << 3) & 0x1111111111111111u;
  return bits * 15;
}

BEAST_HD inline uint64_t widen_by_2(uint64_t bits) {
  bits = (bits | bits << 4) & 0x0F0Fu;
  bits = (bits | bits << 2) & 0x3333u;
  bits = (bits | bits << 1) & 0x5555u;
  return bits * 3;
}

// Adds a pattern of at most 41 pixels at start, round the end of the line.
BEAST_HD inline void place(Coverage& coverage, uint64_t pattern, uint32_t start) {
  const uint32_t word = start >> 6, shift = start & 63;
  const uint64_t first = pattern << shift;
  const uint64_t rest = shift ? pattern >> (64 - shift) : 0;
  uint64_t* words = coverage.words;
  if (word < 2) {
    words[word] |= first;
    words[word + 1] |= rest;
  } else {
    words[2] |= first & 0xFFFFFFFFu;
    words[0] |= first >> 32 | rest << 32;
    return;
  }
  words[0] |= words[2] >> 32;
  words[2] &= 0xFFFFFFFFu;
}

// The offsets of a player's or missile's copies, a bit each for 0, 16, 32 and 64.
BEAST_HD inline uint32_t copies_of(uint32_t nusiz) {
  return 0x1D197531u >> (4 * (nusiz & 7)) & 15;
}

BEAST_HD inline void place_copies(Coverage& coverage, uint64_t pattern, uint32_t copies,
                                  uint32_t position) {
  uint64_t near = copies & 1 ? pattern : 0;
  if (copies & 2) near |= pattern << 16;
  if (copies & 4) near |= pattern << 32;
  if (near) place(coverage, near, position);
  if (copies & 8) place(coverage, pattern, (position + 64) % 160);
}

BEAST_HD inline uint8_t shown_graphics(const TiaState& tia, int player) {
  return tia.vdelp[player] ? tia.old_grp[player] : tia.grp[player];
}

BEAST_HD inline void cover_player(TiaState& tia, int player, Coverage& coverage) {
  const uint32_t graphics = shown_graphics(tia, player);
  uint64_t pattern = tia.refp[player] ? graphics : reverse_byte(graphics);
  const uint32_t mode = tia.nusiz[player] & 7;
  if (mode == 5) pattern = widen_by_2(pattern) << 1;  // Wide ones come one pixel late.
  if (mode == 7) pattern = widen_by_4(pattern) << 1;
  uint32_t copies = copies_of(mode);
  if (tia.first_hidden[player]) copies &= ~1u;
  place_copies(coverage, pattern, copies, tia.position[player ? kP1 : kP0]);
}

BEAST_HD inline void cover_missile(TiaState& tia, int missile, Coverage& coverage) {
  uint32_t size = tia.nusiz[missile] >> 4 & 3;
  if (missile == 0 && tia.stars) {
    if (tia.star_line == 1) size |= 1;
    if (tia.star_line == 2) return;
  }
  place_copies(coverage, (1u << (1u << size)) - 1, copies_of(tia.nusiz[missile]),
               tia.position[missile ? kM1 : kM0]);
}

BEAST_HD inline void cover_playfield(TiaState& tia, Coverage& coverage) {
  const uint32_t pf0 = tia.pf[0] >> 4, pf1 = tia.pf[1], pf2 = tia.pf[2];
  const uint32_t left = pf0 | reverse_byte(pf1) << 4 | pf2 << 12;
  const uint32_t right =
      tia.reflected ? reverse_byte(pf2) | pf1 << 8 | reverse_byte(pf0) << 12 : left;
  coverage.words[0] = widen_by_4(left & 0xFFFF);
  coverage.words[1] = widen_by_4((left >> 16) | (right & 0xFFF) << 4);
  coverage.words[2] = widen_by_4(right >> 12);
}

BEAST_HD inline int lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

BEAST_HD inline void renew_coverage(TiaState& tia, uint32_t objects) {
  tia.stale = static_cast<uint8_t>(tia.stale & ~objects);
  for (; objects != 0; objects &= objects - 1) {
    const int object = lowest_bit(objects);
    Coverage& coverage = tia.coverage[object];
    coverage = {};
    switch (object) {
      case kP0:
        cover_player(tia, 0, coverage);
        break;
      case kP1:
        cover_player(tia, 1, coverage);
        break;
      case kM0:
        cover_missile(tia, 0, coverage);
        break;
      case kM1:
        cover_missile(tia, 1, coverage);
        break;
      case kPf:
        cover_playfield(tia, coverage);
        break;
      default:
        place(coverage, (1u << (1u << (tia.ctrlpf >> 4 & 3))) - 1, tia.position[kBl]);
    }
  }
}

BEAST_HD inline void set_enabled(TiaState& tia, int object, bool enabled) {
  tia.enabled = static_cast<uint8_t>((tia.enabled & ~(1 << object)) |
                                     (enabled ? 1 << object : 0));
  tia.stale = static_cast<uint8_t>(tia.stale | 1 << object);
}

BEAST_HD inline void set_stale(TiaState& tia, int object) {
  tia.stale = static_cast<uint8_t>(tia.stale | 1 << object);
}

// ---- Drawing and collisions. ----

// Bits begin to end - 1 of a line, cut to word i.
BEAST_HD inline uint64_t word_range(int begin, int end, int i) {
  const int from = begin - 64 * i, to = end - 64 * i;
  uint64_t range = ~uint64_t{0};
  if (from > 0) range &= ~uint64_t{0} << from;
  if (to < 64) range &= ~(~uint64_t{0} << to);
  return range;
}

BEAST_HD inline void latch_collisions(TiaState& tia, int begin, int end) {
  uint32_t found = 0;
  for (int i = begin >> 6; i <= (end - 1) >> 6; ++i) {
    uint64_t at[kNumObjects];
    uint64_t once = 0, twice = 0;
    for (int object = 0; object < kNumObjects; ++object) {
      at[object] = tia.enabled >> object & 1 ? tia.coverage[object].words[i] : 0;
      twice |= once & at[object];
      once |= at[object];
    }
    twice &= word_range(begin, end, i);
    if (twice == 0) continue;
    for (int one = 1; one < kNumObjects; ++one) {
      for (int other = 0; other < one; ++other) {
        if (at[one] & at[other] & twice) found |= collision_bit(one, other);
      }
    }
  }
  tia.collisions = static_cast<uint16_t>(tia.collisions | found);
}

BEAST_HD inline void draw_pixels(const TiaState& tia, uint8_t* line, int begin,
                                 int end) {
  if (tia.vblank & 2) {
    memset(line + begin, 0, static_cast<size_t>(end - begin));
    return;
  }
  const auto shown = [&tia](int object, int i) {
    return tia.enabled >> object & 1 ? tia.coverage[object].words[i] : 0;
  };
  const bool priority = tia.ctrlpf & 4;
  const bool score = (tia.ctrlpf & 2) && (!priority || tia.enabled == 1 << kPf);
  const bool on_top = priority && !score;
  const uint8_t p0 = tia.colors[0], p1 = tia.colors[1], pf = tia.colors[2];
  const LayerColors colors = on_top ? LayerColors{tia.colors[3], p1, p0, pf}
                                    : LayerColors{tia.colors[3], pf, p1, p0};
  for (int i = begin >> 6; i <= (end - 1) >> 6; ++i) {
    uint64_t playfield = shown(kPf, i) | shown(kBl, i);
    uint64_t first = shown(kP0, i) | shown(kM0, i);
    uint64_t second = shown(kP1, i) | shown(kM1, i);
    if (score) {  // The playfield's halves have the players' colours, and their place.
      const uint64_t left = i == 0 ? ~uint64_t{0} : i == 1 ? 0xFFFF : 0;
      playfield = shown(kBl, i);
      first |= shown(kPf, i) & left;
      second |= shown(kPf, i) & ~left;
    }
    const Layers layers =
        on_top ? Layers{second, first, playfield} : Layers{playfield, second, first};
    paint(line + 64 * i, word_range(begin, end, i), layers, colors);
  }
}

BEAST_HD inline void draw_segment(TiaState& tia, uint8_t* pixels, int begin, int end) {
  const uint32_t possible = possible_collisions(tia.enabled);
  const bool collides = !(tia.vblank & 2) && (possible & ~tia.collisions);
  if (collides || tia.drawing == kDrawn) {
    if (tia.stale & tia.enabled) renew_coverage(tia, tia.stale & tia.enabled);
    if (collides) latch_collisions(tia, begin, end);
    if (tia.drawing == kDrawn) {
      uint8_t* line = pixels + tia.row * kWidth;
      draw_pixels(tia, line, begin, end);
      if (tia.hmove_blank) {
        for (int p = begin; p < 8 && p < end; ++p) line[p] = 0;
      }
    }
  }
  if (begin < 8 && end >= 8) tia.hmove_blank = 0;
}

BEAST_HD inline void finish_line(TiaState& tia) {
  if (tia.reflected != (tia.ctrlpf & 1)) {
    tia.reflected = tia.ctrlpf & 1;
    set_stale(tia, kPf);
  }
  for (int player = 0; player < 2; ++player) {
    if (!tia.first_hidden[player]) continue;
    tia.first_hidden[player] = 0;
    set_stale(tia, player ? kP1 : kP0);
  }
  if (tia.stars) {
    const int steps[4] = {18, 33, 0, 17};
    tia.star_line = (tia.star_line + 1) & 3;
    tia.position[kM0] =
        static_cast<uint8_t>((tia.position[kM0] + 160 - steps[tia.star_line]) % 160);
    set_stale(tia, kM0);
  }
}

BEAST_HD BEAST_NOINLINE inline void draw_lines(TiaState& tia, uint8_t* pixels,
                                               int32_t until) {
  if (until > tia.window_end) until = tia.window_end;
  if (until <= tia.drawn_to) return;
  for (;;) {
    const int32_t first_pixel = tia.line_end - kLineClocks + kBlankClocks;
    const int32_t stop = until < tia.line_end ? until : tia.line_end;
    const int32_t begin = tia.drawn_to - first_pixel, end = stop - first_pixel;
    if (end > 0 && begin < 160) draw_segment(tia, pixels, begin > 0 ? begin : 0, end);
    tia.drawn_to = stop;
    // A line is finished only when something beyond it is drawn: the last one never is.
    if (until <= tia.line_end) return;
    finish_line(tia);
    tia.line_end += kLineClocks;
    ++tia.row;
  }
}

BEAST_HD BEAST_ALWAYS_INLINE void catch_up(TiaState& tia, uint8_t* pixels,
                                           int32_t until) {
  if (until > tia.drawn_to) draw_lines(tia, pixels, until);
}

// ---- Frames. ----

struct TiaWindow {
  int first_line, height, max_lines;
  bool hmove_blanks;
  bool color_loss;  // As PAL: colours are lost after a frame with an odd line count.
};

// After this a frame begins, even where the last one was cut: qbert ends none while
// RESET is held, so that every reset of it leaves one. (In ale-py the cut frame goes on
// and takes in the lines above the picture; none of the games shows it.)
BEAST_HD inline void reset_tia(TiaState& tia, Screens& screens) {
  tia = {};
  tia.vsync_end = kNever;
  memset(&screens, 0, sizeof(screens));
}

// Begins a frame: the time is counted anew, from the beginning of the current line.
// Returns how many cycles all times have to be reduced by.
BEAST_HD inline int32_t start_frame(TiaState& tia, const TiaWindow& window,
                                    int32_t cycles) {
  const int32_t shift = cycles / kLineCycles * kLineCycles;
  tia.frame_offset = cycles - shift;
  tia.hmove_at -= 3 * shift;
  if (tia.vsync_end != kNever) tia.vsync_end -= 3 * shift;
  tia.dump_released_at -= shift;
  tia.buffer ^= 1;
  tia.row = 0;
  tia.drawn_to = kLineClocks * window.first_line;
  tia.line_end = tia.drawn_to + kLineClocks;
  tia.window_end = tia.drawn_to + kLineClocks * window.height;
  tia.last_cycle = (window.max_lines + 1) * kLineCycles - 1;
  tia.hmove_blanks = window.hmove_blanks;
  if (window.color_loss) {
    tia.color_loss = shift / kLineCycles & 1;
    for (uint8_t& color : tia.colors) {
      color = static_cast<uint8_t>((color & 0xFE) | tia.color_loss);
    }
  }
  return shift;
}

// What ale-py does to a frame that ran out of instructions: from the current line down
// only the luminance is left. Most are long past the picture by then, but not where an
// illegal opcode stopped the CPU.
BEAST_HD inline void grey_out(const TiaState& tia, uint8_t* pixels, int32_t cycle) {
  const int32_t first_line = tia.line_end / kLineClocks - 1 - tia.row;
  const int32_t height = tia.window_end / kLineClocks - first_line;
  const int32_t row = cycle / kLineCycles - first_line;
  for (int32_t i = (row > 0 ? row : 0) * kWidth; i < height * kWidth; ++i) {
    pixels[i] = pixels[i] >> 1 & 7;
  }
}

// ---- Registers. ----

// Where a player whose position is set at this line clock begins.
BEAST_HD inline int strobe_position(int line_clock, bool player) {
  if (line_clock < kBlankClocks) return player ? 3 : 2;
  return (line_clock - kBlankClocks + (player ? 5 : 4)) % 160;
}

BEAST_HD inline void strobe_player(TiaState& tia, uint8_t* pixels, int player,
                                   int32_t clock) {
  const int object = player ? kP1 : kP0;
  const int position = strobe_position(clock % kLineClocks, true);
  const int moved = (position - tia.position[object] + 160) % 160;
  const uint32_t mode = tia.nusiz[player] & 7, copies = copies_of(mode);
  const int width = mode == 5 ? 16 : mode == 7 ? 32 : 8;
  bool hidden = true;
  for (int copy = 0; copy < 4; ++copy) {
    if (!(copies >> copy & 1)) continue;
    const int into = moved - (copy == 3 ? 64 : 16 * copy);
    if (into >= 0 && into < 4) hidden = false;  // Not yet begun: it begins anew.
    // A copy that is being drawn is finished first.
    if (into >= 4 && into < 4 + width) catch_up(tia, pixels, clock + 11);
  }
  tia.first_hidden[player] = hidden;
  tia.position[object] = static_cast<uint8_t>(position);
  set_stale(tia, object);
}

// What comes out wrong on the real chip when it strobes shortly after HMOVE.
BEAST_HD inline int position_after_hmove(int object, int since, int line_clock,
                                         int otherwise) {
  if (object == kM0 && since == 60 && line_clock == 69) return 8;
  if (object == kM1 && since == 9 && line_clock == 18) return 3;
  if (object == kBl) {
    if (since == 54 && (line_clock == 60 || line_clock == 69)) return 10;
    if (since == 9 && line_clock == 18) return 3;
    if (since == 21 && line_clock == 30) return 6;
    if (since == 18 && line_clock == 27) return 5;
  }
  return otherwise;
}

BEAST_HD inline void strobe(TiaState& tia, int object, int32_t clock) {
  const int line_clock = clock % kLineClocks;
  tia.position[object] = static_cast<uint8_t>(position_after_hmove(
      object, clock - tia.hmove_at, line_clock, strobe_position(line_clock, false)));
  set_stale(tia, object);
}

// How far right HMOVE at this cycle of a line moves an object.
BEAST_HD inline int hmove_distance(int cycle, int nibble) {
  const int count = nibble ^ 8;
  if (cycle <= 20) {
    const int least = (3 * cycle - 11 + 64) / 4 - 16 - 6;  // Rounded down.
    return 8 - count > least ? 8 - count : least;
  }
  if (cycle <= 54) return 0;
  if (cycle == 75) return 8 - count;
  const int moved = count - (14 - (3 * (cycle - 55) + 2) / 4);
  return moved > 0 ? -moved : 0;
}

BEAST_HD inline void hmove(TiaState& tia, int32_t clock) {
  const int cycle = clock % kLineClocks / 3;
  if ((cycle <= 20 || cycle == 75) && tia.hmove_blanks) tia.hmove_blank = 1;
  const int objects[5] = {kP0, kP1, kM0, kM1, kBl};
  for (int i = 0; i < 5; ++i) {
    // Most games do it at the line's beginning and leave most objects where they are.
    if (tia.hm[i] == 0 && cycle <= 11) continue;
    const int distance = hmove_distance(cycle, tia.hm[i]);
    if (distance == 0) continue;
    const int object = objects[i];
    int position = tia.position[object] + distance;
    if (position < 0) position += 160;
    if (position >= 160) position -= 160;
    tia.position[object] = static_cast<uint8_t>(position);
    set_stale(tia, object);
  }
  for (int player = 0; player < 2; ++player) {
    if (!tia.first_hidden[player]) continue;
    tia.first_hidden[player] = 0;
    set_stale(tia, player ? kP1 : kP0);
  }
  if (tia.stars) set_stale(tia, kM0);
  tia.stars = 0;
  tia.hmove_at = clock;
}

BEAST_HD inline void show_player(TiaState& tia, int player) {
  set_enabled(tia, player ? kP1 : kP0, shown_graphics(tia, player) != 0);
}

BEAST_HD inline void show_ball(TiaState& tia) {
  set_enabled(tia, kBl, tia.vdelbl ? tia.old_enabl : tia.enabl);
}

// What a write does, after the cycle's access; WSYNC is the CPU's business.
BEAST_HD BEAST_ALWAYS_INLINE void set_register(TiaState& tia, uint8_t* pixels,
                                               uint32_t reg, uint8_t value,
                                               int32_t cycle) {
  const int32_t clock = 3 * cycle;
  if (BEAST_UNLIKELY(cycle > tia.last_cycle)) {
    tia.stop = 1;
    tia.partial = 0;
  }
  switch (reg) {
    case kVSYNC:
      if (value & 2) {
        tia.vsync_end = clock + kLineClocks;
      } else if (clock >= tia.vsync_end) {
        tia.vsync_end = kNever;
        tia.stop = 1;
        tia.partial = 0;
      }
      tia.vsync = value;
      break;
    case kVBLANK:
      if ((value ^ tia.vblank) & 2) catch_up(tia, pixels, clock + 1);
      if (value & 0x80) {
        tia.dumping = 1;
      } else if (tia.dumping) {
        tia.dumping = 0;
        tia.dump_released_at = cycle;
      }
      tia.vblank = value;
      break;
    case kNUSIZ0:
    case kNUSIZ1: {
      const int player = reg - kNUSIZ0;
      if (value == tia.nusiz[player] && !tia.first_hidden[player]) break;
      catch_up(tia, pixels, clock + 8);
      tia.nusiz[player] = value;
      tia.first_hidden[player] = 0;
      set_stale(tia, player ? kP1 : kP0);
      set_stale(tia, player ? kM1 : kM0);
      break;
    }
    case kCOLUP0:
    case kCOLUP1:
    case kCOLUPF:
    case kCOLUBK: {
      uint8_t& color = tia.colors[reg - kCOLUP0];
      value = static_cast<uint8_t>((value & 0xFE) | tia.color_loss);
      if (value == color) break;
      if (tia.drawing) catch_up(tia, pixels, clock);
      color = value;
      break;
    }
    case kCTRLPF:
      if (value == tia.ctrlpf && tia.reflected == (value & 1)) break;
      catch_up(tia, pixels, clock);
      tia.ctrlpf = value;
      set_stale(tia, kBl);
      if (clock % kLineClocks < kBlankClocks + 79 && tia.reflected != (value & 1)) {
        tia.reflected = value & 1;
        set_stale(tia, kPf);
      }
      break;
    case kREFP0:
    case kREFP1: {
      const int player = reg - kREFP0;
      const uint8_t reflected = value >> 3 & 1;
      if (reflected == tia.refp[player]) break;
      catch_up(tia, pixels, clock + 1);
      tia.refp[player] = reflected;
      set_stale(tia, player ? kP1 : kP0);
      break;
    }
    case kPF0:
    case kPF1:
    case kPF2: {
      uint8_t& bits = tia.pf[reg - kPF0];
      if (reg == kPF0) value &= 0xF0;
      if (value == bits) break;
      catch_up(tia, pixels, clock + (0x3254 >> (4 * (cycle & 3)) & 15));
      bits = value;
      set_enabled(tia, kPf, tia.pf[0] | tia.pf[1] | tia.pf[2]);
      break;
    }
    case kRESP0:
    case kRESP1:
      catch_up(tia, pixels, clock);
      strobe_player(tia, pixels, reg - kRESP0, clock);
      break;
    case kRESM0:
    case kRESM1:
      catch_up(tia, pixels, clock + 8);
      strobe(tia, reg == kRESM0 ? kM0 : kM1, clock);
      break;
    case kRESBL:
      catch_up(tia, pixels, clock);
      strobe(tia, kBl, clock);
      break;
    case kGRP0:
      if (value == tia.grp[0] && tia.old_grp[1] == tia.grp[1]) break;
      catch_up(tia, pixels, clock + 1);
      tia.grp[0] = value;
      tia.old_grp[1] = tia.grp[1];
      show_player(tia, 0);
      show_player(tia, 1);
      break;
    case kGRP1:
      if (value == tia.grp[1] && tia.old_grp[0] == tia.grp[0] &&
          tia.old_enabl == tia.enabl) {
        break;
      }
      catch_up(tia, pixels, clock + 1);
      tia.grp[1] = value;
      tia.old_grp[0] = tia.grp[0];
      tia.old_enabl = tia.enabl;
      show_player(tia, 0);
      show_player(tia, 1);
      show_ball(tia);
      break;
    case kENAM0:
    case kENAM1: {
      const int missile = reg - kENAM0;
      const uint8_t enabled = value >> 1 & 1;
      if (enabled == tia.enam[missile]) break;
      catch_up(tia, pixels, clock);
      tia.enam[missile] = enabled;
      set_enabled(tia, missile ? kM1 : kM0, enabled && !tia.resmp[missile]);
      break;
    }
    case kENABL: {
      const uint8_t enabled = value >> 1 & 1;
      if (enabled == tia.enabl) break;
      catch_up(tia, pixels, clock);
      tia.enabl = enabled;
      show_ball(tia);
      break;
    }
    case kHMM0:
      if (tia.hm[2] == 7 && value >> 4 == 6 && clock - tia.hmove_at == 63) {
        catch_up(tia, pixels, clock);
        tia.stars = 1;
        tia.star_line = 0;
      }
      tia.hm[2] = value >> 4;
      break;
    case kHMP0:
    case kHMP1:
    case kHMM1:
    case kHMBL:
      tia.hm[reg - kHMP0] = value >> 4;
      break;
    case kVDELP0:
    case kVDELP1: {
      const int player = reg - kVDELP0;
      if ((value & 1) == tia.vdelp[player]) break;
      catch_up(tia, pixels, clock);
      tia.vdelp[player] = value & 1;
      show_player(tia, player);
      break;
    }
    case kVDELBL:
      if ((value & 1) == tia.vdelbl) break;
      catch_up(tia, pixels, clock);
      tia.vdelbl = value & 1;
      show_ball(tia);
      break;
    case kRESMP0:
    case kRESMP1: {
      const int missile = reg - kRESMP0;
      const uint8_t locked = value >> 1 & 1;
      if (locked == tia.resmp[missile]) break;
      catch_up(tia, pixels, clock);
      tia.resmp[missile] = locked;
      if (!locked) {
        const int mode = tia.nusiz[missile] & 7;
        const int middle = mode == 5 ? 8 : mode == 7 ? 16 : 4;
        tia.position[missile ? kM1 : kM0] =
            static_cast<uint8_t>((tia.position[missile ? kP1 : kP0] + middle) % 160);
      }
      set_enabled(tia, missile ? kM1 : kM0, tia.enam[missile] && !locked);
      break;
    }
    case kHMOVE:
      catch_up(tia, pixels, clock);
      hmove(tia, clock);
      break;
    case kHMCLR:
      memset(tia.hm, 0, sizeof(tia.hm));
      break;
    case kCXCLR:
      catch_up(tia, pixels, clock);
      tia.collisions = 0;
      break;
    default:  // Sound, and registers that do nothing here.
      break;
  }
}

// ---- Frames in two phases. ----

// What the first phase leaves for the second. Working memory, not a part of a machine's
// state: it is empty between frames.
struct TiaLog {
  // Games write about 1,000 times per frame. A full log is drawn at once, which gives
  // the same picture.
  static constexpr int kCapacity = 4096;
  static constexpr uint8_t kRead = 0x40;  // No register: something was only looked at.
  static constexpr uint8_t kCut = 0x41;   // Nor this: the frame was cut off here.
  struct Access {
    int32_t cycle;
    uint8_t reg, value;
  };

  TiaState tia;     // Before the first access.
  uint8_t* pixels;  // The buffer that the frame goes to.
  int32_t count;
  Access accesses[kCapacity];
};

BEAST_HD inline void start_log(TiaLog& log, const TiaState& tia, uint8_t* pixels) {
  log.tia = tia;
  log.tia.drawing = kDrawn;
  log.pixels = pixels;
  log.count = 0;
}

// The second phase. Empties the log.
BEAST_HD BEAST_NOINLINE inline void draw_log(TiaLog& log) {
  for (int i = 0; i < log.count; ++i) {
    const TiaLog::Access& access = log.accesses[i];
    if (access.reg == TiaLog::kRead) {
      catch_up(log.tia, log.pixels, 3 * access.cycle);
    } else if (access.reg == TiaLog::kCut) {
      grey_out(log.tia, log.pixels, access.cycle);
    } else {
      set_register(log.tia, log.pixels, access.reg, access.value, access.cycle);
    }
  }
  log.count = 0;
}

// Of a frame that is logged, pixels is not its buffer but its TiaLog: the CPU hands one
// pointer through and need not know.
BEAST_HD BEAST_NOINLINE inline void note(uint8_t* pixels, uint32_t reg, uint8_t value,
                                         int32_t cycle) {
  TiaLog& log = *reinterpret_cast<TiaLog*>(pixels);
  if (log.count == TiaLog::kCapacity) draw_log(log);
  log.accesses[log.count++] = {cycle, static_cast<uint8_t>(reg), value};
}

// A write by the CPU.
BEAST_HD BEAST_ALWAYS_INLINE void write_register(TiaState& tia, uint8_t* pixels,
                                                 uint32_t reg, uint8_t value,
                                                 int32_t cycle) {
  if (BEAST_UNLIKELY(tia.drawing == kLogged)) note(pixels, reg, value, cycle);
  set_register(tia, pixels, reg, value, cycle);
}

BEAST_HD BEAST_NOINLINE inline void write_tia(TiaState& tia, uint8_t* pixels,
                                              uint32_t reg, uint8_t value,
                                              int32_t cycle) {
  write_register(tia, pixels, reg, value, cycle);
}

// Draws up to a cycle for something that is no write.
BEAST_HD inline void look(TiaState& tia, uint8_t* pixels, int32_t cycle) {
  if (BEAST_UNLIKELY(tia.drawing == kLogged)) note(pixels, TiaLog::kRead, 0, cycle);
  catch_up(tia, pixels, 3 * cycle);
}

BEAST_HD inline void cut_off(TiaState& tia, uint8_t* pixels, int32_t cycle) {
  if (tia.drawing == kLogged) note(pixels, TiaLog::kCut, 0, cycle);
  if (tia.drawing == kDrawn) grey_out(tia, pixels, cycle);
}

// Which pots are plugged in, for read_tia.
struct PaddlePorts {
  bool left, right, swapped;
};

BEAST_HD inline bool is_charged(const TiaState& tia, PaddlePorts ports,
                                const ControlsState& controls, int input,
                                int32_t cycle) {
  if (!(input < 2 ? ports.left : ports.right)) return false;
  if (input >= 2) return true;  // Nobody turns these: no resistance.
  if (tia.dumping) return false;
  const double resistance = controls.paddles[input ^ (ports.swapped ? 1 : 0)];
  const auto needed = static_cast<uint32_t>(1.6 * resistance * 0.01e-6 * 1.19e6);
  // Counted from the first cycle of the frame and without a sign, so a pot released in
  // an earlier frame is never charged.
  const auto now = static_cast<uint32_t>(cycle - tia.frame_offset);
  return now > static_cast<uint32_t>(tia.dump_released_at - tia.frame_offset) + needed;
}

// bus is the byte that was last on the data bus; six of its bits show through.
BEAST_HD BEAST_NOINLINE inline uint8_t read_tia(TiaState& tia, uint8_t* pixels,
                                                PaddlePorts ports,
                                                const ControlsState& controls,
                                                uint32_t address, int32_t cycle,
                                                uint8_t bus) {
  const uint32_t reg = address & 15;
  const uint8_t noise = bus & 0x3F;
  if (reg < 8) {
    look(tia, pixels, cycle);
    return static_cast<uint8_t>(noise | (tia.collisions >> (2 * reg) & 3) << 6);
  }
  bool high = false;
  if (reg < 12) {
    high = is_charged(tia, ports, controls, static_cast<int>(reg - 8), cycle);
  } else if (reg < 14) {
    high = !controls.fire[reg - 12];
  }
  return high ? noise | 0x80 : noise;
}

}  // namespace beast::atari
