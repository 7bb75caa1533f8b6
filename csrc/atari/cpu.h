// SPDX-License-Identifier: Apache-2.0
// The 6507: runs instructions until the TIA says that the frame is complete, or until
// 25,000 of them ran.
//
// The order of things within an instruction is ale-py's: all of its cycles are counted
// first (for an indexed read also the one for a crossed page), then its operand is read
// and its access made, so that every access sees the same time. No access is made that
// the result does not need.
//
// One function holds the loop, so that registers stay in the processor's. Each opcode
// ends with a jump of its own to the next one (GCC, Clang) or goes round a switch.
#pragma once

#include <cstdint>

#include "atari/cartridge.h"
#include "atari/decode.h"
#include "atari/game.h"
#include "atari/machine.h"
#include "atari/platform.h"
#include "atari/riot.h"
#include "atari/tia.h"

namespace beast::atari {

inline constexpr int kMaxInstructions = 25000;

// How addresses choose ROM, for the loop to be compiled once for each.
enum class RomView {
  kBanks,   // One bank of 4K at a time.
  kSlices,  // Of eight places for 1K, chosen by bits 10, 11 and 13 of the address.
};

BEAST_HD inline int from_bcd(int byte) { return (byte >> 4) * 10 + (byte & 15); }
BEAST_HD inline uint8_t to_bcd(int number) {
  number %= 100;
  return static_cast<uint8_t>(number / 10 << 4 | number % 10);
}

// Not under the sanitizers, where GCC would take minutes over the jumps.
#if defined(__GNUC__) && !defined(__CUDACC__) && !defined(BEAST_SANITIZED)
#define BEAST_THREADED 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#endif

BEAST_HD constexpr PaddlePorts paddle_ports(uint8_t flags) {
  const bool both = (flags & kSwappedPaddles) != 0;
  return {(flags & kPaddles) != 0, both, both};
}

// The registers while instructions run, and what instructions do with them. Its
// functions are all inlined and its one object is local to the function that runs them,
// so that most of it lives in the processor's registers. Derived knows where the
// program is: it has mapper(), ports(), read_rom(address) and touch_rom(address), an
// access whose value nobody wants.
template <class Derived>
struct CpuCore {
  Machine& machine;
  uint8_t* const pixels;

  uint8_t a = machine.cpu.a, x = machine.cpu.x, y = machine.cpu.y, c = machine.cpu.c;
  // The zero flag is set where the low byte is 0; negative where bit 7 or 8 is set.
  uint32_t nz = (machine.cpu.z ? 1u : 0u) | (machine.cpu.n & 0x80u) << 1;
  // Both counts of the loop in one number: cycles above, instructions in the low 16.
  uint64_t time = static_cast<uint64_t>(machine.cpu.cycles) << 16;
  uint32_t operand = 0;

  BEAST_HD BEAST_ALWAYS_INLINE Derived& self() { return static_cast<Derived&>(*this); }
  BEAST_HD BEAST_ALWAYS_INLINE int32_t cycles() {
    return static_cast<int32_t>(time >> 16);
  }
  BEAST_HD BEAST_ALWAYS_INLINE void tick(int count) {
    time += (static_cast<uint64_t>(count) << 16) + 1;
  }
  BEAST_HD BEAST_ALWAYS_INLINE void wait(uint32_t count) {
    time += static_cast<uint64_t>(count) << 16;
  }
  BEAST_HD BEAST_ALWAYS_INLINE bool is_near_the_limit() {
    return (time & 0xFFFF) > kMaxInstructions - Game::kBank;
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read(uint32_t address, uint32_t bus) {
    if (BEAST_LIKELY(address & 0x1000)) return self().read_rom(address);
    if ((address & 0x280) == 0x80) return machine.riot.ram[address & 0x7F];
    if (address & 0x80) {
      return read_riot(machine.riot, machine.controls, address, cycles());
    }
    return read_tia(machine.tia, pixels, self().ports(), machine.controls, address,
                    cycles(), static_cast<uint8_t>(bus));
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read_page_0(uint32_t address) {
    if (BEAST_LIKELY(address & 0x80)) return machine.riot.ram[address & 0x7F];
    return read_tia(machine.tia, pixels, self().ports(), machine.controls, address,
                    cycles(), static_cast<uint8_t>(operand));
  }
  BEAST_HD BEAST_ALWAYS_INLINE void wait_for_line() {
    if (BEAST_UNLIKELY(cycles() > machine.tia.last_cycle)) {
      machine.tia.stop = 1;
      machine.tia.partial = 0;
    }
    const int32_t into = cycles() % kLineCycles;
    if (into != 0) wait(static_cast<uint32_t>(kLineCycles - into));
  }
  BEAST_HD BEAST_ALWAYS_INLINE void write_any_tia(uint32_t address, uint8_t value,
                                                  bool after_read) {
    if ((address & 0x3F) == kWSYNC) {
      if (after_read) wait_for_line();
    } else {
      write_tia(machine.tia, pixels, address & 0x3F, value, cycles());
    }
  }
  // Whether that was the last instruction of the frame.
  BEAST_HD BEAST_ALWAYS_INLINE bool write(uint32_t address, uint8_t value) {
    if (BEAST_LIKELY((address & 0x1280) == 0x80)) {
      machine.riot.ram[address & 0x7F] = value;
      return false;
    }
    if (address & 0x1000) {
      self().touch_rom(address);
      if (has_extra_ram(self().mapper()) && (address & 0xF80) == 0) {
        machine.cartridge.ram[address & 0x7F] = value;
      }
      return false;
    }
    if (address & 0x80) {
      write_riot(machine.riot, address, value, cycles());
      return false;
    }
    write_any_tia(address, value, true);
    return machine.tia.stop != 0;
  }
  // The stack is in RAM, or in the TIA, which some games use to draw fast.
  BEAST_HD BEAST_ALWAYS_INLINE bool push(uint32_t value, bool after_read) {
    const uint8_t at = machine.cpu.sp--;
    if (BEAST_LIKELY(at & 0x80)) {
      machine.riot.ram[at & 0x7F] = static_cast<uint8_t>(value);
      return false;
    }
    write_any_tia(at, static_cast<uint8_t>(value), after_read);
    return machine.tia.stop != 0;
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read_stack(uint32_t bus) {
    if (BEAST_LIKELY(machine.cpu.sp & 0x80))
      return machine.riot.ram[machine.cpu.sp & 0x7F];
    return read_tia(machine.tia, pixels, self().ports(), machine.controls,
                    machine.cpu.sp, cycles(), static_cast<uint8_t>(bus));
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t pull(uint32_t bus) {
    ++machine.cpu.sp;
    return read_stack(bus);
  }
  // Before the first pull the byte below is on the bus: alien pulls from the TIA, and
  // its VSYNC depends on it.
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t pull_first() {
    ++machine.cpu.sp;
    if (BEAST_LIKELY(machine.cpu.sp & 0x80))
      return machine.riot.ram[machine.cpu.sp & 0x7F];
    --machine.cpu.sp;
    const uint8_t below = read_stack(0);
    ++machine.cpu.sp;
    return read_stack(below);
  }

  BEAST_HD BEAST_ALWAYS_INLINE void set_nz(uint8_t value) { nz = value; }
  BEAST_HD BEAST_ALWAYS_INLINE bool is_negative() { return (nz & 0x180) != 0; }
  BEAST_HD BEAST_ALWAYS_INLINE bool is_zero() { return (nz & 0xFF) == 0; }
  BEAST_HD BEAST_ALWAYS_INLINE void test_bits(uint8_t value) {  // BIT
    nz = (a & value ? 1u : 0u) | (value & 0x80u) << 1;
    machine.cpu.v = value >> 6 & 1;
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t flags() {
    return static_cast<uint8_t>(is_negative() << 7 | machine.cpu.v << 6 | 0x30 |
                                machine.cpu.d << 3 | machine.cpu.i << 2 |
                                is_zero() << 1 | c);
  }
  BEAST_HD BEAST_ALWAYS_INLINE void set_flags(uint8_t value) {
    nz = (value & 2 ? 0u : 1u) | (value & 0x80u) << 1;
    machine.cpu.v = value >> 6 & 1;
    machine.cpu.d = value >> 3 & 1;
    machine.cpu.i = value >> 2 & 1;
    c = value & 1;
  }
  BEAST_HD BEAST_ALWAYS_INLINE void add(uint8_t value) {
    const uint8_t old = a;
    if (BEAST_LIKELY(!machine.cpu.d)) {
      const uint32_t sum = a + value + c;
      a = static_cast<uint8_t>(sum);
      c = static_cast<uint8_t>(sum >> 8);
    } else {
      const int sum = from_bcd(a) + from_bcd(value) + c;
      a = to_bcd(sum & 0xFF);
      c = sum > 99;
    }
    machine.cpu.v = ((old ^ a) & (a ^ value)) >> 7;
    set_nz(a);
  }
  BEAST_HD BEAST_ALWAYS_INLINE void subtract(uint8_t value) {
    const uint8_t old = a;
    if (BEAST_LIKELY(!machine.cpu.d)) {
      const uint32_t sum = a + static_cast<uint8_t>(~value) + c;
      a = static_cast<uint8_t>(sum);
      c = static_cast<uint8_t>(sum >> 8);
      machine.cpu.v = ((old ^ a) & (old ^ value)) >> 7;
    } else {
      const int borrow = 1 - c;
      int difference = from_bcd(a) - from_bcd(value) - borrow;
      if (difference < 0) difference += 100;
      // Still below 0 where digits were above 9; ale-py then takes another table's end.
      a = difference < 0 ? static_cast<uint8_t>(from_bcd(difference & 0xFF))
                         : to_bcd(difference);
      c = old >= value + borrow;
      machine.cpu.v = ((old ^ a) & (a ^ value)) >> 7;
    }
    set_nz(a);
  }
  BEAST_HD BEAST_ALWAYS_INLINE void compare(uint8_t with, uint8_t value) {
    c = with >= value;
    set_nz(static_cast<uint8_t>(with - value));
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t shift_left(uint8_t value, uint8_t in) {
    c = value >> 7;
    value = static_cast<uint8_t>(value << 1 | in);
    set_nz(value);
    return value;
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t shift_right(uint8_t value, uint8_t in) {
    c = value & 1;
    value = static_cast<uint8_t>(value >> 1 | in << 7);
    set_nz(value);
    return value;
  }
  BEAST_HD BEAST_ALWAYS_INLINE void rotate_and_add_flags(uint8_t value) {  // ARR
    value &= a;
    a = static_cast<uint8_t>(value >> 1 | c << 7);
    set_nz(a);
    if (!machine.cpu.d) {
      c = a >> 6 & 1;
      machine.cpu.v = (a >> 6 ^ a >> 5) & 1;
      return;
    }
    machine.cpu.v = (value ^ a) >> 6 & 1;
    if ((value & 0x0F) + (value & 0x01) > 0x05) a = (a & 0xF0) | ((a + 6) & 0x0F);
    c = (value & 0xF0) + (value & 0x10) > 0x50;
    if (c) a = static_cast<uint8_t>(a + 0x60);
  }

  // Addresses of the modes; those that read count the cycle for a crossed page.
  BEAST_HD BEAST_ALWAYS_INLINE uint32_t indexed(uint32_t base, uint8_t index) {
    const uint32_t address = (base + index) & 0xFFFF;
    if ((address ^ base) & 0xFF00) wait(1);
    return address;
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint32_t pointer(uint32_t at) {
    const uint32_t low = read_page_0(at & 0xFF);
    return low | static_cast<uint32_t>(read_page_0((at + 1) & 0xFF)) << 8;
  }
  // Skips the rounds of a loop "load the timer, branch back" that are sure to go round
  // again: until it is 0 (BNE), or has expired (BPL).
  // pc is the load's.
  BEAST_HD BEAST_ALWAYS_INLINE void skip_polls(uint32_t branch, uint32_t pc) {
    const RiotState& riot = machine.riot;
    if (riot.shift < 3) return;         // It might pass the value between two loads.
    const int32_t load = cycles() + 4;  // When the next round reads.
    const int32_t value = timer_value(riot, load);
    int32_t goes_on_for;  // In cycles, from the first load.
    const int32_t passed = load - 1 - riot.set_at;
    if (branch == 0xD0 && value > 0) {
      goes_on_for = ((riot.timer - 1) << riot.shift) - passed;
    } else if (branch == 0x10 && value >= 0 && value < 0x80) {
      goes_on_for = (riot.timer << riot.shift) - passed;
    } else if (branch == 0x30 && value >= 0x80) {
      goes_on_for = ((riot.timer - 0x80) << riot.shift) - passed;
    } else {
      return;
    }
    const int32_t round = ((pc ^ (pc + 5)) & 0xFF00) ? 8 : 7;
    const int32_t rounds = (goes_on_for + round - 1) / round;
    if ((time & 0xFFFF) + 2 * static_cast<uint32_t>(rounds) >
        kMaxInstructions - Game::kBank) {
      return;
    }
    wait(static_cast<uint32_t>(rounds * round));
    time += 2 * static_cast<uint64_t>(rounds);
  }

  // To the machine, as it is between frames.
  BEAST_HD BEAST_ALWAYS_INLINE void save(uint32_t pc) {
    machine.cpu.a = a;
    machine.cpu.x = x;
    machine.cpu.y = y;
    machine.cpu.c = c;
    machine.cpu.n = is_negative() ? 0x80 : 0;
    machine.cpu.z = is_zero() ? 0 : 1;
    machine.cpu.pc = static_cast<uint16_t>(pc);
    machine.cpu.cycles = cycles();
  }
};

// The interpreter's: the program is the game's decoded instructions.
template <RomView kView>
struct Loop : CpuCore<Loop<kView>> {
  using Core = CpuCore<Loop<kView>>;
  using Core::machine, Core::time, Core::operand;

  BEAST_HD Loop(const Game& game, Machine& machine, uint8_t* pixels)
      : Core{machine, pixels}, game(game) {}

  const Game& game;
  // Any access to one of these addresses switches banks.
  const uint32_t first_hotspot = first_hotspot_of(mapper());
  const uint32_t num_hotspots = num_hotspots_of(mapper());
  const bool extra_ram = has_extra_ram(mapper());
  bool careful = false;  // Near the limit of instructions.

  // In a view of banks: the next instruction, the code of its bank, the bank's bytes
  // and the address's upper bits. In a view of slices: the code of each, and the
  // address.
  const Instruction* next = nullptr;
  const Instruction* code = nullptr;
  const uint8_t* rom = nullptr;
  uint32_t upper = 0;
  const Instruction* slices[kView == RomView::kSlices ? 8 : 1] = {};
  uint32_t address_of_next = 0;

  BEAST_HD BEAST_ALWAYS_INLINE Mapper mapper() const { return game.info.mapper; }
  BEAST_HD BEAST_ALWAYS_INLINE PaddlePorts ports() const {
    return paddle_ports(game.info.flags);
  }
  // The program counter.
  BEAST_HD BEAST_ALWAYS_INLINE uint32_t pc() {
    if constexpr (kView == RomView::kSlices) return address_of_next & 0xFFFF;
    return upper | (static_cast<uint32_t>(next - code) & 0xFFF);
  }
  BEAST_HD BEAST_ALWAYS_INLINE void advance(int length) {
    if constexpr (kView == RomView::kSlices) {
      address_of_next += static_cast<uint32_t>(length);
    } else {
      next += length;
    }
  }
  BEAST_HD BEAST_ALWAYS_INLINE Instruction fetch() {
    if constexpr (kView == RomView::kSlices) {
      const uint32_t at = address_of_next;
      return slices[(at >> 11 & 4) | (at >> 10 & 3)][at & 0x3FF];
    } else {
      return *next;
    }
  }
  // Looks which code runs at this address: for jumps, and for bank switches.
  BEAST_HD BEAST_ALWAYS_INLINE void go_to(uint32_t address) {
    const bool decoded = (address & 0x1000) && !careful;
    const Instruction* const outside = game.code + Game::kOutside;
    if constexpr (kView == RomView::kSlices) {
      address_of_next = address;
      for (uint32_t place = 0; place < 8; ++place) {
        const uint32_t begin = (place & 4) << 11 | (place & 3) << 10;
        slices[place] = decoded ? game.code + Game::kMargin +
                                      rom_offset(mapper(), machine.cartridge, begin)
                                : outside;
      }
    } else {
      const uint32_t bank = machine.cartridge.bank * uint32_t{Game::kBank};
      rom = game.rom + bank;
      code = decoded ? game.code + Game::kMargin + bank : outside;
      upper = address & 0xF000;
      next = code + (address & 0xFFF);
    }
  }
  // Every jump comes here, as no endless loop is without one.
  BEAST_HD BEAST_ALWAYS_INLINE void jump(uint32_t address) {
    if (BEAST_UNLIKELY(this->is_near_the_limit())) careful = true;
    go_to(address & 0xFFFF);
  }

  BEAST_HD BEAST_ALWAYS_INLINE void touch_rom(uint32_t address) {
    if (BEAST_UNLIKELY((address & 0xFFF) - first_hotspot < num_hotspots)) {
      switch_bank(mapper(), machine.cartridge, address);
      go_to(pc());
    }
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read_rom(uint32_t address) {
    touch_rom(address);
    if constexpr (kView == RomView::kSlices) {
      return game.rom[rom_offset(mapper(), machine.cartridge, address)];
    }
    if (BEAST_UNLIKELY(extra_ram) && (address & 0xF80) == 0x80) {
      return machine.cartridge.ram[address & 0x7F];
    }
    return rom[address & 0xFFF];
  }
  BEAST_HD BEAST_ALWAYS_INLINE void branch_if(bool condition) {
    if (!condition) return;
    this->wait(operand >> 8);
    advance(static_cast<int8_t>(operand));
    if (BEAST_UNLIKELY(this->is_near_the_limit())) jump(pc());
  }
};

// pixels is the frame buffer of the current frame; count is how many instructions of it
// ran already. Returns how many have when it stops: at the end of the frame, at the
// limit, or where translated code begins.
template <RomView kView>
BEAST_HD BEAST_NOINLINE inline uint32_t run_cpu(const Game& game, Machine& machine,
                                                uint8_t* const pixels, uint32_t count) {
  Loop<kView> loop(game, machine, pixels);
  loop.time += count;
  TiaState& tia = machine.tia;
#if defined(BEAST_THREADED)
#define ROW(high)                                                             \
  &&op_0x##high##0, &&op_0x##high##1, &&op_0x##high##2, &&op_0x##high##3,     \
      &&op_0x##high##4, &&op_0x##high##5, &&op_0x##high##6, &&op_0x##high##7, \
      &&op_0x##high##8, &&op_0x##high##9, &&op_0x##high##A, &&op_0x##high##B, \
      &&op_0x##high##C, &&op_0x##high##D, &&op_0x##high##E, &&op_0x##high##F
  static const void* const kLabels[kNumHandlers] = {
      ROW(0),           ROW(1),          ROW(2),          ROW(3),
      ROW(4),           ROW(5),          ROW(6),          ROW(7),
      ROW(8),           ROW(9),          ROW(A),          ROW(B),
      ROW(C),           ROW(D),          ROW(E),          ROW(F),
      &&op_kDecodeNow,  &&op_kStoreATia, &&op_kStoreXTia, &&op_kStoreYTia,
      &&op_kStoreWsync, &&op_kPollTimer, &&op_kTranslated};
#undef ROW
#define LABEL(handler) op_##handler
#define DISPATCH(number) goto* kLabels[number]
#define NEXT                                      \
  {                                               \
    const Instruction instruction = loop.fetch(); \
    loop.operand = operand_of(instruction);       \
    DISPATCH(handler_of(instruction));            \
  }
#else
#define LABEL(handler) case handler
#define DISPATCH(number) \
  {                      \
    handler = number;    \
    goto dispatch;       \
  }
#define NEXT goto next_instruction
#endif
// An opcode: its length, its cycles, what it does.
#define OP(opcode, length, count, ...) \
  LABEL(opcode) : {                    \
    loop.tick(count);                  \
    loop.advance(length);              \
    __VA_ARGS__;                       \
  }                                    \
  NEXT;
// One that may end the frame: did_end says so, after the rest.
#define WRITING_OP(opcode, length, count, did_end, ...) \
  LABEL(opcode) : {                                     \
    loop.tick(count);                                   \
    loop.advance(length);                               \
    __VA_ARGS__;                                        \
    if (BEAST_UNLIKELY(did_end)) goto stopped;          \
  }                                                     \
  NEXT;

  // clang-format off
  loop.jump(machine.cpu.pc);
  if (machine.cpu.jammed) goto stopped;
#if defined(BEAST_THREADED)
  NEXT;
#else
  uint32_t handler;
next_instruction:
  handler = handler_of(loop.fetch());
  loop.operand = operand_of(loop.fetch());
dispatch:
  switch (handler) {
#endif

#include "atari/opcodes.inc"

  // Branches and jumps.
  OP(0x10, 2, 2, loop.branch_if(!loop.is_negative()))
  OP(0x30, 2, 2, loop.branch_if(loop.is_negative()))
  OP(0x50, 2, 2, loop.branch_if(!machine.cpu.v))
  OP(0x70, 2, 2, loop.branch_if(machine.cpu.v))
  OP(0x90, 2, 2, loop.branch_if(!loop.c))
  OP(0xB0, 2, 2, loop.branch_if(loop.c))
  OP(0xD0, 2, 2, loop.branch_if(!loop.is_zero()))
  OP(0xF0, 2, 2, loop.branch_if(loop.is_zero()))
  OP(0x4C, 3, 3, loop.jump(loop.operand))
  OP(0x6C, 3, 5,
     const uint32_t low = loop.read(loop.operand, loop.operand >> 8);
     const uint32_t high = loop.read((loop.operand & 0xFF00) | ((loop.operand + 1) & 0xFF), low);
     loop.jump(low | high << 8))
  WRITING_OP(0x20, 3, 6, tia.stop,
             const uint32_t last = loop.pc() - 1; loop.push(last >> 8, true); loop.push(last, false);
             loop.jump(loop.operand))
  OP(0x60, 1, 6, const uint32_t low = loop.pull_first(); const uint32_t high = loop.pull(low);
     loop.jump((low | high << 8) + 1))
  OP(0x40, 1, 6, const uint8_t status = loop.pull_first(); loop.set_flags(status);
     const uint32_t low = loop.pull(status); const uint32_t high = loop.pull(low);
     loop.jump(low | high << 8))
  WRITING_OP(0x00, 2, 7, tia.stop,
             const uint32_t after = loop.pc(); loop.push(after >> 8, true); loop.push(after, false);
             loop.push(loop.flags(), false); machine.cpu.i = 1; const uint32_t low = loop.read(0xFFFE, 0);
             loop.jump(low | static_cast<uint32_t>(loop.read(0xFFFF, low)) << 8))

  LABEL(0x02): LABEL(0x12): LABEL(0x22): LABEL(0x32): LABEL(0x42): LABEL(0x52):
  LABEL(0x62): LABEL(0x72): LABEL(0x92): LABEL(0xB2): LABEL(0xD2): LABEL(0xF2):
    loop.tick(2);
    machine.cpu.jammed = 1;
    goto stopped;

  // Stores to the TIA, known as such when they were decoded.
  WRITING_OP(kStoreATia, 2, 3, tia.stop, write_tia(tia, pixels, loop.operand, loop.a, loop.cycles()))
  WRITING_OP(kStoreXTia, 2, 3, tia.stop, write_tia(tia, pixels, loop.operand, loop.x, loop.cycles()))
  WRITING_OP(kStoreYTia, 2, 3, tia.stop, write_tia(tia, pixels, loop.operand, loop.y, loop.cycles()))
  WRITING_OP(kStoreWsync, 2, 3, tia.stop, loop.wait_for_line())

  LABEL(kPollTimer) : {
    const uint32_t load = loop.operand & 0xFF;
    loop.skip_polls(loop.operand >> 8, loop.pc());
    loop.operand = 0x284;
    DISPATCH(load);
  }

  LABEL(kTranslated): goto stopped;

  LABEL(kDecodeNow) : {
    if (BEAST_UNLIKELY((loop.time & 0xFFFF) >= kMaxInstructions)) goto stopped;
    const uint32_t at = loop.pc();
    loop.go_to(at);
    uint8_t bytes[3] = {loop.read(at, 0), 0, 0};
    const int length = instruction_length(bytes[0]);
    if (length > 1) bytes[1] = loop.read((at + 1) & 0xFFFF, bytes[0]);
    if (length > 2) bytes[2] = loop.read((at + 2) & 0xFFFF, bytes[1]);
    const Instruction instruction = decode(bytes, at);
    loop.operand = operand_of(instruction);
    if (is_branch(bytes[0])) {  // It may leave the bank, the ROM or the RAM.
      const bool flags_set[4] = {loop.is_negative(), machine.cpu.v != 0, loop.c != 0, loop.is_zero()};
      const bool taken = flags_set[bytes[0] >> 6] == (bytes[0] >> 5 & 1);
      loop.tick(2);
      if (taken) loop.wait(loop.operand >> 8);
      const int distance = taken ? static_cast<int8_t>(bytes[1]) : 0;
      loop.jump(at + 2 + static_cast<uint32_t>(distance));
      NEXT;
    }
    DISPATCH(handler_of(instruction));
  }
#if !defined(BEAST_THREADED)
  }
#endif

stopped:
  loop.save(loop.pc());
  return static_cast<uint32_t>(loop.time & 0xFFFF);
}
// clang-format on

#if defined(BEAST_THREADED)
#pragma GCC diagnostic pop
#endif
#undef LABEL
#undef DISPATCH
#undef NEXT
#undef OP
#undef WRITING_OP

BEAST_HD inline void reset_cpu(const Game& game, Machine& machine) {
  machine.cpu = {};
  machine.cpu.sp = 0xFF;
  machine.cpu.z = 1;
  const auto read = [&](uint32_t address) {
    return game.rom[rom_offset(game.info.mapper, machine.cartridge, address)];
  };
  machine.cpu.pc = static_cast<uint16_t>(read(0xFFFC) | read(0xFFFD) << 8);
}

BEAST_HD inline uint32_t interpret(const Game& game, Machine& machine, uint8_t* pixels,
                                   uint32_t count) {
  switch (game.info.mapper) {
    case Mapper::kE0:
    case Mapper::kFE:
      return run_cpu<RomView::kSlices>(game, machine, pixels, count);
    default:
      return run_cpu<RomView::kBanks>(game, machine, pixels, count);
  }
}

BEAST_HD inline void run_instructions(const Game& game, Machine& machine,
                                      uint8_t* pixels) {
#if !defined(__CUDA_ARCH__)
  if (game.run) return game.run(game, machine, pixels);
#endif
  interpret(game, machine, pixels, 0);
}

}  // namespace beast::atari
