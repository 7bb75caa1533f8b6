// SPDX-License-Identifier: Apache-2.0
// The state of one environment, all of it plain data. No numbers are explained here:
// each part's own header says what it does with its state.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atari/random.h"

namespace beast::atari {

inline constexpr int kWidth = 160, kMaxHeight = 256;

// The two frame buffers; a frame is drawn in one, the next frame in the other.
struct Screens {
  uint8_t pixels[2][kMaxHeight * kWidth];
};

struct CpuState {
  uint8_t a, x, y, sp;
  uint8_t n;  // Bit 7 is the negative flag.
  uint8_t z;  // The zero flag is set where this is 0.
  uint8_t c, v, d, i;
  uint8_t jammed;  // By an opcode that stops the CPU for good.
  uint16_t pc;
  // Since the beginning of the scan line in which the frame began.
  int32_t cycles;
};

struct RiotState {
  uint8_t ram[128];
  uint8_t direction_a, direction_b;
  uint8_t was_read_after_expiry;
  int32_t timer, shift;
  int32_t set_at, read_at;  // In cycles as the CPU's.
};

// The pixels of one line that an object covers, bit p % 64 of words[p / 64].
struct Coverage {
  uint64_t words[3];
};

enum Object { kP0, kM0, kP1, kM1, kPf, kBl, kNumObjects };

enum Drawing : uint8_t {
  kUndrawn,  // Nobody looks at this frame's picture.
  kDrawn,
  kLogged,  // It is drawn later, from a TiaLog.
};

struct TiaState {
  // Times in colour clocks since the beginning of the scan line in which the frame
  // began, so that a time modulo 228 is a place in its line.
  int32_t drawn_to;    // All before this is drawn and its collisions are latched.
  int32_t line_end;    // Of the line that drawn_to is in.
  int32_t row;         // Of the picture, of that line.
  int32_t window_end;  // No picture and no collisions from here on.
  int32_t last_cycle;  // A write after this cycle ends the frame.
  int32_t hmove_at;
  int32_t vsync_end;         // From here on a falling VSYNC ends the frame.
  int32_t dump_released_at;  // In cycles.
  int32_t frame_offset;      // In cycles: where in its line the frame began.

  uint8_t drawing;  // Of this frame: one of Drawing.
  uint8_t stop;     // The frame is complete.
  uint8_t partial;  // The last frame ran out of instructions.
  uint8_t buffer;   // Of Screens, that holds the current frame.
  uint8_t color_loss;
  uint8_t hmove_blanks;  // HMOVE may blank the beginning of a line.

  uint8_t vsync, vblank, ctrlpf, dumping;
  uint8_t nusiz[2], refp[2], vdelp[2], resmp[2], enam[2];
  uint8_t grp[2], old_grp[2];
  uint8_t enabl, old_enabl, vdelbl;
  uint8_t pf[3], reflected;
  uint8_t colors[4];              // P0, P1, playfield and ball, background.
  uint8_t hm[5];                  // High nibbles of HMP0, HMP1, HMM0, HMM1, HMBL.
  uint8_t position[kNumObjects];  // kPf's is not used.
  uint8_t first_hidden[2];        // The first copy of a player does not show.
  uint8_t hmove_blank;
  uint8_t stars, star_line;
  uint8_t enabled;  // Bit per object that may show.
  uint8_t stale;    // Bit per object whose coverage is to be computed again.
  uint16_t collisions;
  Coverage coverage[kNumObjects];
};

struct CartridgeState {
  uint8_t bank;
  uint8_t slices[4];  // E0: which 1K shows in each quarter.
  uint8_t ram[128];   // SC: the Superchip's.
};

// What is plugged in and pressed.
struct ControlsState {
  uint8_t port_a;      // A bit is 0 while its switch is closed.
  uint8_t fire[2];     // Left and right joystick.
  uint8_t switches;    // RIOT port B.
  int32_t paddles[2];  // Resistances of players A and B.
};

// What a game's rules remember from frame to frame.
struct RulesState {
  int32_t score, reward, lives;
  int32_t previous;  // Game by game, see games.h.
  uint8_t terminal, started;
};

struct Machine {
  CpuState cpu;
  RiotState riot;
  TiaState tia;
  CartridgeState cartridge;
  ControlsState controls;
  RulesState rules;
  int32_t frame_number, episode_frame_number;
  uint8_t actions[2];  // The accepted ones of players A and B, for sticky actions.
  double sticky_probability;
  Random sticky_random;   // Seeded by the user.
  Random console_random;  // The same for all: fills RAM, sets the timer.
};

static_assert(std::is_trivially_copyable_v<Machine>);
static_assert(std::is_trivially_copyable_v<Screens>);

}  // namespace beast::atari
