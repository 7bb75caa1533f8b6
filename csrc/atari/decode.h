// SPDX-License-Identifier: Apache-2.0
// Instructions as the CPU's loop wants them: decoded once, when a game is loaded.
#pragma once

#include <cstdint>

#include "atari/cartridge.h"
#include "atari/game.h"
#include "atari/platform.h"
#include "atari/tia.h"

namespace beast::atari {

// Handlers 0 to 255 are the opcodes, whatever they address. These are more.
enum Handler : uint16_t {
  kDecodeNow = 256,  // Bytes that are not fixed, or whose reading switches banks.
  kStoreATia,        // STA zero page; the operand is a TIA register, not WSYNC.
  kStoreXTia,
  kStoreYTia,
  kStoreWsync,  // Whichever register: the value does not count.
  kPollTimer,   // A load of the timer and a branch back to it; the operand is both
                // opcodes.
  kTranslated,  // Translated code begins here: the interpreter's work is done.
  kNumHandlers
};

BEAST_HD constexpr int instruction_length(int opcode) {
  const int low = opcode & 15;
  const bool odd_row = opcode & 16;
  switch (low) {
    case 0x0:
      return opcode == 0x20 ? 3 : odd_row || opcode >= 0x80 ? 2 : 1;
    case 0x2:
      return !odd_row && opcode >= 0x80 ? 2 : 1;
    case 0x8:
    case 0xA:
      return 1;
    case 0x9:
    case 0xB:
      return odd_row ? 3 : 2;
    default:
      return low >= 0xC ? 3 : 2;
  }
}

BEAST_HD inline bool is_timer(uint32_t address) {
  return (address & 0x1280) == 0x0280 && (address & 5) == 4;
}

BEAST_HD constexpr bool is_branch(int opcode) { return (opcode & 0x1F) == 0x10; }

// The operand of a branch: how far it goes, and above that how many cycles it takes
// more when it is taken.
BEAST_HD inline uint32_t branch_operand(uint8_t distance, uint32_t address) {
  const uint32_t next = (address & 0xFF) + 0x102;
  const uint32_t target = next + static_cast<uint32_t>(static_cast<int8_t>(distance));
  return distance | ((next ^ target) & 0xFF00 ? 2u : 1u) << 8;
}

// address is that of bytes[0]; only its low byte counts.
BEAST_HD inline Instruction decode(const uint8_t bytes[3], uint32_t address) {
  const uint8_t opcode = bytes[0];
  if (is_branch(opcode)) {
    return make_instruction(opcode, branch_operand(bytes[1], address));
  }
  const int length = instruction_length(opcode);
  if (length == 1) return make_instruction(opcode, 0);
  if (length == 3) {
    return make_instruction(opcode, bytes[1] | static_cast<uint32_t>(bytes[2]) << 8);
  }
  const bool stores = opcode == 0x85 || opcode == 0x86 || opcode == 0x84;
  if (!stores || bytes[1] >= 0x80) return make_instruction(opcode, bytes[1]);
  const uint32_t reg = bytes[1] & 0x3F;
  if (reg == kWSYNC) return make_instruction(kStoreWsync, reg);
  return make_instruction(opcode == 0x85   ? kStoreATia
                          : opcode == 0x86 ? kStoreXTia
                                           : kStoreYTia,
                          reg);
}

// Fills game.code from game.rom; for the host, once per game.
inline void decode_rom(Game& game) {
  const Mapper mapper = game.info.mapper;
  const int window = mapper == Mapper::kE0 ? 1024 : Game::kBank;
  for (Instruction& instruction : game.code) {
    instruction = make_instruction(kDecodeNow, 0);
  }
  for (int at = 0; at < game.rom_size; ++at) {
    const int place = at % window;
    const int length = instruction_length(game.rom[at]);
    bool fixed = place + length <= window;
    for (int i = 0; i < length && fixed; ++i) {
      // A slice of E0 may lie in any quarter, so also in the last one.
      const uint32_t address =
          static_cast<uint32_t>(mapper == Mapper::kE0 ? 0xC00 + place + i : place + i);
      if (is_hotspot(mapper, address)) fixed = false;
      if (has_extra_ram(mapper) && address < 0x100) fixed = false;
    }
    if (!fixed) continue;
    uint8_t bytes[5] = {};
    for (int i = 0; i < 5 && place + i < window; ++i) bytes[i] = game.rom[at + i];
    if (is_branch(bytes[0])) {
      const int target = place + 2 + static_cast<int8_t>(bytes[1]);
      if (target < 0 || target >= window) continue;
    }
    Instruction& instruction = game.code[Game::kMargin + at];
    instruction = decode(bytes, static_cast<uint32_t>(place));

    const bool loads = bytes[0] == 0xAD || bytes[0] == 0xAE || bytes[0] == 0xAC;
    const bool branches_back =
        (bytes[3] == 0xD0 || bytes[3] == 0x10 || bytes[3] == 0x30) && bytes[4] == 0xFB;
    if (loads && branches_back && is_timer(operand_of(instruction))) {
      instruction =
          make_instruction(kPollTimer, bytes[0] | static_cast<uint32_t>(bytes[3]) << 8);
    }
  }
}

}  // namespace beast::atari
