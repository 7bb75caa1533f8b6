// SPDX-License-Identifier: Apache-2.0
// What is fixed for one game: its ROM, decoded, and the table row that says what is
// plugged in and which rules count.
#pragma once

#include <cstdint>

#include "atari/games.h"

namespace beast::atari {

// One instruction, decoded: which of the CPU's handlers runs it, and its operand bytes.
struct Instruction {
  uint16_t handler;
  uint16_t operand;
};

struct Game {
  static constexpr int kBank = 4096, kMaxBanks = 4;

  GameInfo info;
  bool pal;
  int rom_size;
  uint8_t rom[kMaxBanks * kBank];  // A 2K ROM is there twice.
  // Decoded at every byte of the ROM, and one more bank for code outside the ROM, all
  // of it "decode when it runs".
  Instruction code[(kMaxBanks + 1) * kBank];
};

}  // namespace beast::atari
