// SPDX-License-Identifier: Apache-2.0
// Which part of the ROM the CPU sees in its 4K window. Any access, read or write, to a
// few addresses at the window's end switches:
//   2K, 4K  nothing to switch
//   F8, F6  FF8 and FF9, FF6 to FF9: one of two or four banks of 4K
//   E0      FE0 to FF7: which 1K slice shows in each of the first three quarters
//   FE      no such address: bit 13 of the address itself chooses the bank
//   ..SC    as F8 and F6, and 128 bytes of RAM: written at 000, read at 080
#pragma once

#include <cstdint>

#include "atari/game.h"
#include "atari/machine.h"
#include "atari/platform.h"

namespace beast::atari {

BEAST_HD constexpr bool has_extra_ram(Mapper mapper) {
  return mapper == Mapper::kF8SC || mapper == Mapper::kF6SC;
}

BEAST_HD inline void reset_cartridge(Mapper mapper, CartridgeState& cartridge,
                                     Random& random) {
  cartridge.bank = mapper == Mapper::kF8 || mapper == Mapper::kF8SC ? 1 : 0;
  for (int i = 0; i < 4; ++i) cartridge.slices[i] = static_cast<uint8_t>(4 + i);
  if (has_extra_ram(mapper)) {
    for (uint8_t& byte : cartridge.ram) {
      byte = static_cast<uint8_t>(next_random(random));
    }
  }
}

// The addresses, cut to 12 bits, an access to which may switch.
BEAST_HD constexpr uint32_t first_hotspot_of(Mapper mapper) {
  switch (mapper) {
    case Mapper::kF8:
    case Mapper::kF8SC:
      return 0xFF8;
    case Mapper::kF6:
    case Mapper::kF6SC:
      return 0xFF6;
    default:
      return 0xFE0;
  }
}
BEAST_HD constexpr uint32_t num_hotspots_of(Mapper mapper) {
  switch (mapper) {
    case Mapper::kF8:
    case Mapper::kF8SC:
      return 2;
    case Mapper::kF6:
    case Mapper::kF6SC:
      return 4;
    case Mapper::kE0:
      return 24;
    default:
      return 0;
  }
}
BEAST_HD constexpr bool is_hotspot(Mapper mapper, uint32_t address) {
  return (address & 0xFFF) - first_hotspot_of(mapper) < num_hotspots_of(mapper);
}

BEAST_HD inline void switch_bank(Mapper mapper, CartridgeState& cartridge,
                                 uint32_t address) {
  const uint32_t offset = address & 0xFFF;
  if (mapper == Mapper::kE0) {
    cartridge.slices[(offset - 0xFE0) >> 3] = static_cast<uint8_t>(offset & 7);
  } else if (mapper == Mapper::kF8 || mapper == Mapper::kF8SC) {
    cartridge.bank = static_cast<uint8_t>(offset - 0xFF8);
  } else {
    cartridge.bank = static_cast<uint8_t>(offset - 0xFF6);
  }
}

// Where in the ROM the byte at this address lies.
BEAST_HD inline uint32_t rom_offset(Mapper mapper, const CartridgeState& cartridge,
                                    uint32_t address) {
  switch (mapper) {
    case Mapper::kE0:
      return cartridge.slices[(address >> 10) & 3] * 1024u + (address & 0x3FF);
    case Mapper::kFE:
      return (address & 0x2000 ? 0 : Game::kBank) + (address & 0xFFF);
    default:
      return cartridge.bank * static_cast<uint32_t>(Game::kBank) + (address & 0xFFF);
  }
}

}  // namespace beast::atari
