// SPDX-License-Identifier: Apache-2.0
// What translated programs are made of: translator.h writes a C++ file per ROM that
// includes this one and becomes a shared object, which translation.h loads.
//
// Such a file is one function with a label for every place that is jumped to, and an
// expression for every instruction, from the same list that the interpreter runs. As
// operands are constants there, what is left of most instructions is a line of machine
// code. What it cannot do (code in RAM, the last instructions before the limit of a
// frame, addresses that nobody foresaw) it leaves to the interpreter.
#pragma once

#include <cstdint>

#include "atari/cartridge.h"
#include "atari/cpu.h"
#include "atari/machine.h"
#include "atari/platform.h"
#include "atari/tia.h"
#include "atari/translation_abi.h"

namespace beast::atari {

// Rom has the ROM: kBytes, kMapper and the flags of its game, kFlags.
template <class Rom>
struct Translated : CpuCore<Translated<Rom>> {
  using Core = CpuCore<Translated<Rom>>;
  using Core::machine;

  Translated(Machine& machine, uint8_t* pixels, uint32_t count)
      : Core{machine, pixels} {
    this->time += count;
  }

  const uint8_t* rom = Rom::kBytes;  // The bank that the program runs in.
  uint32_t upper = 0;                // The bits of its address that choose no byte.
  bool switched = false;             // The last instruction switched banks.

  static constexpr bool kSwitches = num_hotspots_of(Rom::kMapper) > 0;

  static constexpr Mapper mapper() { return Rom::kMapper; }
  static constexpr PaddlePorts ports() { return paddle_ports(Rom::kFlags); }

  BEAST_ALWAYS_INLINE void touch_rom(uint32_t address) {
    if (!kSwitches || BEAST_LIKELY(!is_hotspot(Rom::kMapper, address))) return;
    switch_bank(Rom::kMapper, machine.cartridge, address);
    rom = Rom::kBytes + machine.cartridge.bank * Game::kBank;
    switched = true;
  }
  BEAST_ALWAYS_INLINE uint8_t read_rom(uint32_t address) {
    touch_rom(address);
    if constexpr (Rom::kMapper == Mapper::kE0 || Rom::kMapper == Mapper::kFE) {
      return Rom::kBytes[rom_offset(Rom::kMapper, machine.cartridge, address)];
    }
    if (has_extra_ram(Rom::kMapper) && (address & 0xF80) == 0x80) {
      return machine.cartridge.ram[address & 0x7F];
    }
    return rom[address & 0xFFF];
  }
  // A store to a TIA register, with the register known when this is compiled.
  template <uint32_t kRegister>
  BEAST_ALWAYS_INLINE bool store(uint8_t value) {
    this->tick(3);
    if constexpr (kRegister == kWSYNC) {
      this->wait_for_line();
    } else if constexpr (is_strobe(kRegister)) {
      write_tia(machine.tia, this->pixels, kRegister, value, this->cycles());
    } else {
      write_register(machine.tia, this->pixels, kRegister, value, this->cycles());
    }
    return machine.tia.stop != 0;
  }
  // Those that do much whenever they are written.
  static constexpr bool is_strobe(uint32_t reg) {
    return (reg >= kRESP0 && reg <= kRESBL) || reg == kRESMP0 || reg == kRESMP1 ||
           reg == kHMOVE;
  }
};

// What an opcode does; run() says whether that ended the frame.
template <int kOpcode>
struct Operation;

#define OP(opcode, length, count, ...)                  \
  template <>                                           \
  struct Operation<opcode> {                            \
    template <class Loop>                               \
    static BEAST_ALWAYS_INLINE bool run(Loop& loop) {   \
      [[maybe_unused]] Machine& machine = loop.machine; \
      loop.tick(count);                                 \
      __VA_ARGS__;                                      \
      return false;                                     \
    }                                                   \
  };
#define WRITING_OP(opcode, length, count, did_end, ...) \
  template <>                                           \
  struct Operation<opcode> {                            \
    template <class Loop>                               \
    static BEAST_ALWAYS_INLINE bool run(Loop& loop) {   \
      [[maybe_unused]] Machine& machine = loop.machine; \
      loop.tick(count);                                 \
      __VA_ARGS__;                                      \
      return did_end;                                   \
    }                                                   \
  };
#include "atari/opcodes.inc"
#undef OP
#undef WRITING_OP

}  // namespace beast::atari

// The statements of the function; `place` is an address without its upper bits.
#define BEAST_LEAVE(place)     \
  {                            \
    pc = loop.upper | (place); \
    goto leave;                \
  }
#define BEAST_RUN(opcode, value, next) \
  loop.operand = value;                \
  if (BEAST_UNLIKELY(Operation<opcode>::run(loop))) BEAST_LEAVE(next)
// One that may switch banks.
#define BEAST_RUN_FAR(opcode, value, next) \
  BEAST_RUN(opcode, value, next)           \
  if (BEAST_UNLIKELY(loop.switched)) {     \
    pc = loop.upper | (next);              \
    goto dispatch;                         \
  }
// One that is known to, so that the program goes on at another label.
#define BEAST_RUN_TO(opcode, value, next, label) \
  BEAST_RUN(opcode, value, next)                 \
  loop.switched = false;                         \
  BEAST_CHECK_LIMIT(next)                        \
  goto label;
#define BEAST_STORE(reg, value, next) \
  if (BEAST_UNLIKELY(loop.template store<reg>(value))) BEAST_LEAVE(next)
#define BEAST_POLL(branch, place) loop.skip_polls(branch, place);
// Every endless loop has a jump backwards or one through `dispatch`.
#define BEAST_CHECK_LIMIT(place) \
  if (BEAST_UNLIKELY(loop.is_near_the_limit())) BEAST_LEAVE(place)
#define BEAST_RETURN()                                                      \
  {                                                                         \
    loop.tick(6);                                                           \
    const uint32_t low = loop.pull_first();                                 \
    pc = ((low | static_cast<uint32_t>(loop.pull(low)) << 8) + 1) & 0xFFFF; \
    goto dispatch;                                                          \
  }
#define BEAST_JUMP_THROUGH(at_low, at_high)                         \
  {                                                                 \
    loop.tick(5);                                                   \
    const uint32_t low = loop.read(at_low, (at_low) >> 8);          \
    pc = low | static_cast<uint32_t>(loop.read(at_high, low)) << 8; \
    goto dispatch;                                                  \
  }
// Pushes the address of its own last byte; target is the 16 bits.
#define BEAST_CALL(last, target)                              \
  {                                                           \
    loop.tick(6);                                             \
    const uint32_t address = loop.upper | (last);             \
    const bool ended = loop.push(address >> 8, true);         \
    if (BEAST_UNLIKELY(loop.push(address, false) || ended)) { \
      pc = target;                                            \
      goto leave;                                             \
    }                                                         \
  }
