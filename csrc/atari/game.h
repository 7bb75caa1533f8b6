// SPDX-License-Identifier: Apache-2.0
// What is fixed for one game: its ROM, decoded, and the table row that says what is
// plugged in and which rules count.
#pragma once

#include <cstdint>

#include "atari/games.h"
#include "atari/platform.h"

namespace beast::atari {

// One instruction, decoded: which of the CPU's handlers runs it in the low half, its
// operand in the high one. One number, as the loop is fastest with one load.
using Instruction = uint32_t;

BEAST_HD constexpr Instruction make_instruction(uint32_t handler, uint32_t operand) {
  return handler | operand << 16;
}
BEAST_HD constexpr uint32_t handler_of(Instruction instruction) {
  return instruction & 0xFFFF;
}
BEAST_HD constexpr uint32_t operand_of(Instruction instruction) {
  return instruction >> 16;
}

struct Machine;

struct Game {
  static constexpr int kBank = 4096, kMaxBanks = 4;

  GameInfo info;
  bool pal;
  int rom_size;
  uint8_t rom[kMaxBanks * kBank];  // A 2K ROM is there twice.
  // Decoded at every byte of the ROM, bank after bank; one more bank for code outside
  // the ROM, all of it "decode when it runs"; and the same before and behind, for
  // branches that miss.
  static constexpr int kMargin = 256, kOutside = kMargin + kMaxBanks * kBank;
  Instruction code[kOutside + kBank + kMargin];

  // Runs a frame's instructions in the interpreter's place, if set; context is its own.
  // See translation.h.
  void (*run)(const Game& game, Machine& machine, uint8_t* pixels);
  void* context;
};

}  // namespace beast::atari
