// SPDX-License-Identifier: Apache-2.0
// What a translated program gives libatari: one of these, as beast_atari_translation.
#pragma once

#include <cstdint>

#include "atari/machine.h"

namespace beast::atari {

// Changes with this file. Everything else that must agree, the layout of a Machine
// first, is the headers', and those are libatari's own (recompile.py).
inline constexpr uint32_t kTranslationVersion = 1;

struct Translation {
  uint32_t version, machine_size;
  uint32_t rom_size;
  const uint8_t* rom;  // What it was made from, as in Game.
  // Offsets in the ROM at which run() can begin.
  uint32_t num_entries;
  const uint16_t* entries;
  // From the machine's program counter on, until the frame is complete or until it
  // comes where the interpreter has to go on. count is the number of instructions of
  // this frame so far; returns what it is afterwards.
  uint32_t (*run)(Machine* machine, uint8_t* pixels, uint32_t count);
};

}  // namespace beast::atari
