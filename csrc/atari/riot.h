// SPDX-License-Identifier: Apache-2.0
// The RIOT (M6532): 128 bytes of RAM, the timer and two ports. Times are in CPU cycles.
#pragma once

#include <cstdint>

#include "atari/machine.h"
#include "atari/platform.h"

namespace beast::atari {

// The RAM is not touched: it outlives resets.
BEAST_HD inline void reset_riot(RiotState& riot, Random& random) {
  riot.timer = 25 + static_cast<int32_t>(next_random(random) % 75);
  riot.shift = 6;
  riot.set_at = 0;
  riot.read_at = 0;
  riot.was_read_after_expiry = 0;
  riot.direction_a = riot.direction_b = 0;
}

// The timer's value before it expired, negative afterwards.
BEAST_HD inline int32_t timer_value(const RiotState& riot, int32_t cycle) {
  return riot.timer - ((cycle - 1 - riot.set_at) >> riot.shift) - 1;
}

BEAST_HD inline uint8_t read_timer(RiotState& riot, int32_t cycle) {
  int32_t value = timer_value(riot, cycle);
  if (value >= 0) return static_cast<uint8_t>(value);
  const int32_t passed = cycle - 1 - riot.set_at;
  value = (riot.timer << riot.shift) - passed - 1;  // It now counts every cycle,
  if (value <= -2 && !riot.was_read_after_expiry) {
    riot.was_read_after_expiry = 1;
    riot.read_at = cycle;
  }
  if (riot.was_read_after_expiry) {  // until it is read.
    const int32_t offset = riot.read_at - (riot.set_at + (riot.timer << riot.shift));
    value = riot.timer - (passed >> riot.shift) - offset;
  }
  return static_cast<uint8_t>(value);
}

BEAST_HD BEAST_NOINLINE inline uint8_t read_riot(RiotState& riot,
                                                 const ControlsState& controls,
                                                 uint32_t address, int32_t cycle) {
  switch (address & 7) {
    case 0:
      return controls.port_a;
    case 1:
      return riot.direction_a;
    case 2:
      return controls.switches;
    case 3:
      return riot.direction_b;
    case 4:
    case 6:
      return read_timer(riot, cycle);
    default:
      return timer_value(riot, cycle) < 0 && !riot.was_read_after_expiry ? 0x80 : 0;
  }
}

BEAST_HD BEAST_NOINLINE inline void write_riot(RiotState& riot, uint32_t address,
                                               uint8_t value, int32_t cycle) {
  if ((address & 0x14) == 0x14) {
    const int shifts[4] = {0, 3, 6, 10};
    riot.timer = value;
    riot.shift = shifts[address & 3];
    riot.set_at = cycle;
    riot.was_read_after_expiry = 0;
  } else if ((address & 7) == 1) {
    riot.direction_a = value;
  } else if ((address & 7) == 3) {
    riot.direction_b = value;
  }
}

}  // namespace beast::atari
