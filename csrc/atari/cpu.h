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

// The registers while instructions run, and what they do. Its functions are all inlined
// and its one object is local to run_cpu, so that most of it lives in the processor's
// registers.
template <RomView kView>
struct Loop {
  const Game& game;
  Machine& machine;
  uint8_t* const pixels;
  const Mapper mapper = game.info.mapper;
  // Any access to one of these addresses switches banks.
  const uint32_t first_hotspot = first_hotspot_of(mapper);
  const uint32_t num_hotspots = num_hotspots_of(mapper);
  const bool extra_ram = has_extra_ram(mapper);

  uint8_t a = machine.cpu.a, x = machine.cpu.x, y = machine.cpu.y, c = machine.cpu.c;
  // The zero flag is set where the low byte is 0; negative where bit 7 or 8 is set.
  uint32_t nz = (machine.cpu.z ? 1u : 0u) | (machine.cpu.n & 0x80u) << 1;
  // Both counts of the loop in one number: cycles above, instructions in the low 16.
  uint64_t time = static_cast<uint64_t>(machine.cpu.cycles) << 16;
  uint32_t operand = 0;
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

  BEAST_HD BEAST_ALWAYS_INLINE PaddlePorts ports() const {
    const bool both = (game.info.flags & kSwappedPaddles) != 0;
    return {(game.info.flags & kPaddles) != 0, both, both};
  }
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
                                      rom_offset(mapper, machine.cartridge, begin)
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
    if (BEAST_UNLIKELY(is_near_the_limit())) careful = true;
    go_to(address & 0xFFFF);
  }

  BEAST_HD BEAST_ALWAYS_INLINE void switch_if_hotspot(uint32_t address) {
    if (BEAST_UNLIKELY((address & 0xFFF) - first_hotspot < num_hotspots)) {
      switch_bank(mapper, machine.cartridge, address);
      go_to(pc());
    }
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read_rom(uint32_t address) {
    switch_if_hotspot(address);
    if constexpr (kView == RomView::kSlices) {
      return game.rom[rom_offset(mapper, machine.cartridge, address)];
    }
    if (BEAST_UNLIKELY(extra_ram) && (address & 0xF80) == 0x80) {
      return machine.cartridge.ram[address & 0x7F];
    }
    return rom[address & 0xFFF];
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read(uint32_t address, uint32_t bus) {
    if (BEAST_LIKELY(address & 0x1000)) return read_rom(address);
    if ((address & 0x280) == 0x80) return machine.riot.ram[address & 0x7F];
    if (address & 0x80) {
      return read_riot(machine.riot, machine.controls, address, cycles());
    }
    return read_tia(machine.tia, pixels, ports(), machine.controls, address, cycles(),
                    static_cast<uint8_t>(bus));
  }
  BEAST_HD BEAST_ALWAYS_INLINE uint8_t read_page_0(uint32_t address) {
    if (BEAST_LIKELY(address & 0x80)) return machine.riot.ram[address & 0x7F];
    return read_tia(machine.tia, pixels, ports(), machine.controls, address, cycles(),
                    static_cast<uint8_t>(operand));
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
      switch_if_hotspot(address);
      if (extra_ram && (address & 0xF80) == 0) {
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
    return read_tia(machine.tia, pixels, ports(), machine.controls, machine.cpu.sp,
                    cycles(), static_cast<uint8_t>(bus));
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
  BEAST_HD BEAST_ALWAYS_INLINE void branch_if(bool condition) {
    if (!condition) return;
    wait(operand >> 8);
    advance(static_cast<int8_t>(operand));
    if (BEAST_UNLIKELY(is_near_the_limit())) jump(pc());
  }
  // Skips the rounds of a loop "load the timer, branch back" that are sure to go round
  // again: until it is 0 (BNE), or has expired (BPL).
  BEAST_HD BEAST_ALWAYS_INLINE void skip_polls(uint32_t branch) {
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
    const int32_t round = ((pc() ^ (pc() + 5)) & 0xFF00) ? 8 : 7;
    const int32_t rounds = (goes_on_for + round - 1) / round;
    if ((time & 0xFFFF) + 2 * static_cast<uint32_t>(rounds) >
        kMaxInstructions - Game::kBank) {
      return;
    }
    wait(static_cast<uint32_t>(rounds * round));
    time += 2 * static_cast<uint64_t>(rounds);
  }
};

// pixels is the frame buffer of the current frame.
template <RomView kView>
BEAST_HD BEAST_NOINLINE inline void run_cpu(const Game& game, Machine& machine,
                                            uint8_t* const pixels) {
  Loop<kView> loop{game, machine, pixels};
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
      &&op_kStoreWsync, &&op_kPollTimer};
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

// The operations that read: `value` is what they have read.
#define READ_IMM(op, ...) \
  OP(op, 2, 2, const uint8_t value = loop.operand & 0xFF; __VA_ARGS__)
#define READ_ZP(op, ...) \
  OP(op, 2, 3, const uint8_t value = loop.read_page_0(loop.operand); __VA_ARGS__)
#define READ_ZPX(op, index, ...)                                                      \
  OP(op, 2, 4, const uint8_t value = loop.read_page_0((loop.operand + index) & 0xFF); \
     __VA_ARGS__)
#define READ_ABS(op, ...)                                                        \
  OP(op, 3, 4, const uint8_t value = loop.read(loop.operand, loop.operand >> 8); \
     __VA_ARGS__)
#define READ_ABX(op, index, ...)                                           \
  OP(op, 3, 4, const uint32_t address = loop.indexed(loop.operand, index); \
     const uint8_t value = loop.read(address, loop.operand >> 8); __VA_ARGS__)
#define READ_INX(op, ...)                                                    \
  OP(op, 2, 6, const uint32_t address = loop.pointer(loop.operand + loop.x); \
     const uint8_t value = loop.read(address, address >> 8); __VA_ARGS__)
#define READ_INY(op, ...)                                        \
  OP(op, 2, 5, const uint32_t base = loop.pointer(loop.operand); \
     const uint32_t address = loop.indexed(base, loop.y);        \
     const uint8_t value = loop.read(address, base >> 8); __VA_ARGS__)
#define READ_ALL(imm, zp, zpx, abs, abx, aby, inx, iny, ...) \
  READ_IMM(imm, __VA_ARGS__)                                 \
  READ_ZP(zp, __VA_ARGS__)                                   \
  READ_ZPX(zpx, loop.x, __VA_ARGS__)                         \
  READ_ABS(abs, __VA_ARGS__)                                 \
  READ_ABX(abx, loop.x, __VA_ARGS__)                         \
  READ_ABX(aby, loop.y, __VA_ARGS__)                         \
  READ_INX(inx, __VA_ARGS__)                                 \
  READ_INY(iny, __VA_ARGS__)

#define WRITE_ZP(op, value) WRITING_OP(op, 2, 3, loop.write(loop.operand, value), )
#define WRITE_ZPX(op, index, value) \
  WRITING_OP(op, 2, 4, loop.write((loop.operand + index) & 0xFF, value), )
#define WRITE_ABS(op, value) WRITING_OP(op, 3, 4, loop.write(loop.operand, value), )
#define WRITE_ABX(op, index, value)                \
  WRITING_OP(op, 3, 5, loop.write(address, value), \
             const uint32_t address = (loop.operand + index) & 0xFFFF)
#define WRITE_INX(op, value)                       \
  WRITING_OP(op, 2, 6, loop.write(address, value), \
             const uint32_t address = loop.pointer(loop.operand + loop.x))
#define WRITE_INY(op, value)                       \
  WRITING_OP(op, 2, 6, loop.write(address, value), \
             const uint32_t address = (loop.pointer(loop.operand) + loop.y) & 0xFFFF)

// The operations that read, modify and write `value`.
#define MODIFY_AT(op, length, count, bus, where, ...)       \
  WRITING_OP(op, length, count, loop.write(address, value), \
             const uint32_t address = (where)&0xFFFF;       \
             uint8_t value = loop.read(address, bus); __VA_ARGS__)
#define MODIFY_ZP(op, ...)                                   \
  WRITING_OP(op, 2, 5, loop.write(loop.operand, value),      \
             uint8_t value = loop.read_page_0(loop.operand); \
             __VA_ARGS__)
#define MODIFY_ZPX(op, ...) \
  MODIFY_AT(op, 2, 6, loop.operand, (loop.operand + loop.x) & 0xFF, __VA_ARGS__)
#define MODIFY_ABS(op, ...) \
  MODIFY_AT(op, 3, 6, loop.operand >> 8, loop.operand, __VA_ARGS__)
#define MODIFY_ABX(op, ...) \
  MODIFY_AT(op, 3, 7, loop.operand >> 8, loop.operand + loop.x, __VA_ARGS__)
#define MODIFY_ABY(op, ...) \
  MODIFY_AT(op, 3, 7, loop.operand >> 8, loop.operand + loop.y, __VA_ARGS__)
#define MODIFY_INX(op, ...) \
  MODIFY_AT(op, 2, 8, address >> 8, loop.pointer(loop.operand + loop.x), __VA_ARGS__)
#define MODIFY_INY(op, ...) \
  MODIFY_AT(op, 2, 8, address >> 8, loop.pointer(loop.operand) + loop.y, __VA_ARGS__)
#define MODIFY_ALL(zp, zpx, abs, abx, aby, inx, iny, ...) \
  MODIFY_ZP(zp, __VA_ARGS__)                              \
  MODIFY_ZPX(zpx, __VA_ARGS__)                            \
  MODIFY_ABS(abs, __VA_ARGS__)                            \
  MODIFY_ABX(abx, __VA_ARGS__)                            \
  MODIFY_ABY(aby, __VA_ARGS__)                            \
  MODIFY_INX(inx, __VA_ARGS__)                            \
  MODIFY_INY(iny, __VA_ARGS__)

  // clang-format off
  loop.go_to(machine.cpu.pc);
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

  // Loads and stores.
  READ_ALL(0xA9, 0xA5, 0xB5, 0xAD, 0xBD, 0xB9, 0xA1, 0xB1, loop.set_nz(loop.a = value))
  READ_IMM(0xA2, loop.set_nz(loop.x = value))
  READ_ZP(0xA6, loop.set_nz(loop.x = value))
  READ_ZPX(0xB6, loop.y, loop.set_nz(loop.x = value))
  READ_ABS(0xAE, loop.set_nz(loop.x = value))
  READ_ABX(0xBE, loop.y, loop.set_nz(loop.x = value))
  READ_IMM(0xA0, loop.set_nz(loop.y = value))
  READ_ZP(0xA4, loop.set_nz(loop.y = value))
  READ_ZPX(0xB4, loop.x, loop.set_nz(loop.y = value))
  READ_ABS(0xAC, loop.set_nz(loop.y = value))
  READ_ABX(0xBC, loop.x, loop.set_nz(loop.y = value))
  WRITE_ZP(0x85, loop.a)
  WRITE_ZPX(0x95, loop.x, loop.a)
  WRITE_ABS(0x8D, loop.a)
  WRITE_ABX(0x9D, loop.x, loop.a)
  WRITE_ABX(0x99, loop.y, loop.a)
  WRITE_INX(0x81, loop.a)
  WRITE_INY(0x91, loop.a)
  WRITE_ZP(0x86, loop.x)
  WRITE_ZPX(0x96, loop.y, loop.x)
  WRITE_ABS(0x8E, loop.x)
  WRITE_ZP(0x84, loop.y)
  WRITE_ZPX(0x94, loop.x, loop.y)
  WRITE_ABS(0x8C, loop.y)
  OP(0xAA, 1, 2, loop.set_nz(loop.x = loop.a))
  OP(0xA8, 1, 2, loop.set_nz(loop.y = loop.a))
  OP(0x8A, 1, 2, loop.set_nz(loop.a = loop.x))
  OP(0x98, 1, 2, loop.set_nz(loop.a = loop.y))
  OP(0xBA, 1, 2, loop.set_nz(loop.x = machine.cpu.sp))
  OP(0x9A, 1, 2, machine.cpu.sp = loop.x)

  // Arithmetic.
  READ_ALL(0x69, 0x65, 0x75, 0x6D, 0x7D, 0x79, 0x61, 0x71, loop.add(value))
  READ_ALL(0xE9, 0xE5, 0xF5, 0xED, 0xFD, 0xF9, 0xE1, 0xF1, loop.subtract(value))
  READ_IMM(0xEB, loop.subtract(value))
  READ_ALL(0x29, 0x25, 0x35, 0x2D, 0x3D, 0x39, 0x21, 0x31, loop.set_nz(loop.a &= value))
  READ_ALL(0x09, 0x05, 0x15, 0x0D, 0x1D, 0x19, 0x01, 0x11, loop.set_nz(loop.a |= value))
  READ_ALL(0x49, 0x45, 0x55, 0x4D, 0x5D, 0x59, 0x41, 0x51, loop.set_nz(loop.a ^= value))
  READ_ALL(0xC9, 0xC5, 0xD5, 0xCD, 0xDD, 0xD9, 0xC1, 0xD1, loop.compare(loop.a, value))
  READ_IMM(0xE0, loop.compare(loop.x, value))
  READ_ZP(0xE4, loop.compare(loop.x, value))
  READ_ABS(0xEC, loop.compare(loop.x, value))
  READ_IMM(0xC0, loop.compare(loop.y, value))
  READ_ZP(0xC4, loop.compare(loop.y, value))
  READ_ABS(0xCC, loop.compare(loop.y, value))
  READ_ZP(0x24, loop.test_bits(value))
  READ_ABS(0x2C, loop.test_bits(value))
  OP(0xE8, 1, 2, loop.set_nz(++loop.x))
  OP(0xC8, 1, 2, loop.set_nz(++loop.y))
  OP(0xCA, 1, 2, loop.set_nz(--loop.x))
  OP(0x88, 1, 2, loop.set_nz(--loop.y))

  // Read, modify, write.
#define MODIFY_FOUR(zp, zpx, abs, abx, ...) \
  MODIFY_ZP(zp, __VA_ARGS__)                \
  MODIFY_ZPX(zpx, __VA_ARGS__)              \
  MODIFY_ABS(abs, __VA_ARGS__)              \
  MODIFY_ABX(abx, __VA_ARGS__)
  MODIFY_FOUR(0xE6, 0xF6, 0xEE, 0xFE, loop.set_nz(++value))
  MODIFY_FOUR(0xC6, 0xD6, 0xCE, 0xDE, loop.set_nz(--value))
  MODIFY_FOUR(0x06, 0x16, 0x0E, 0x1E, value = loop.shift_left(value, 0))
  MODIFY_FOUR(0x26, 0x36, 0x2E, 0x3E, value = loop.shift_left(value, loop.c))
  MODIFY_FOUR(0x46, 0x56, 0x4E, 0x5E, value = loop.shift_right(value, 0))
  MODIFY_FOUR(0x66, 0x76, 0x6E, 0x7E, value = loop.shift_right(value, loop.c))
#undef MODIFY_FOUR
  OP(0x0A, 1, 2, loop.a = loop.shift_left(loop.a, 0))
  OP(0x2A, 1, 2, loop.a = loop.shift_left(loop.a, loop.c))
  OP(0x4A, 1, 2, loop.a = loop.shift_right(loop.a, 0))
  OP(0x6A, 1, 2, loop.a = loop.shift_right(loop.a, loop.c))

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

  // Stack and flags.
  WRITING_OP(0x48, 1, 3, loop.push(loop.a, true), )
  WRITING_OP(0x08, 1, 3, loop.push(loop.flags(), true), )
  OP(0x68, 1, 4, loop.set_nz(loop.a = loop.pull_first()))
  OP(0x28, 1, 4, loop.set_flags(loop.pull_first()))
  OP(0x18, 1, 2, loop.c = 0)
  OP(0x38, 1, 2, loop.c = 1)
  OP(0x58, 1, 2, machine.cpu.i = 0)
  OP(0x78, 1, 2, machine.cpu.i = 1)
  OP(0xB8, 1, 2, machine.cpu.v = 0)
  OP(0xD8, 1, 2, machine.cpu.d = 0)
  OP(0xF8, 1, 2, machine.cpu.d = 1)
  OP(0xEA, 1, 2, )

  // The undocumented ones.
  MODIFY_ALL(0x07, 0x17, 0x0F, 0x1F, 0x1B, 0x03, 0x13,
             value = loop.shift_left(value, 0); loop.set_nz(loop.a |= value))
  MODIFY_ALL(0x27, 0x37, 0x2F, 0x3F, 0x3B, 0x23, 0x33,
             value = loop.shift_left(value, loop.c); loop.set_nz(loop.a &= value))
  MODIFY_ALL(0x47, 0x57, 0x4F, 0x5F, 0x5B, 0x43, 0x53,
             value = loop.shift_right(value, 0); loop.set_nz(loop.a ^= value))
  MODIFY_ALL(0x67, 0x77, 0x6F, 0x7F, 0x7B, 0x63, 0x73,
             value = loop.shift_right(value, loop.c); loop.add(value))
  MODIFY_ALL(0xC7, 0xD7, 0xCF, 0xDF, 0xDB, 0xC3, 0xD3, --value; loop.compare(loop.a, value))
  MODIFY_ALL(0xE7, 0xF7, 0xEF, 0xFF, 0xFB, 0xE3, 0xF3, ++value; loop.subtract(value))
  OP(0xA7, 2, 4, loop.set_nz(loop.a = loop.x = loop.read_page_0(loop.operand)))  // One cycle more, in ale-py.
  READ_ZPX(0xB7, loop.y, loop.set_nz(loop.a = loop.x = value))
  READ_ABS(0xAF, loop.set_nz(loop.a = loop.x = value))
  READ_ABX(0xBF, loop.y, loop.set_nz(loop.a = loop.x = value))
  READ_INX(0xA3, loop.set_nz(loop.a = loop.x = value))
  READ_INY(0xB3, loop.set_nz(loop.a = loop.x = value))
  WRITE_ZP(0x87, loop.a & loop.x)
  WRITE_ZPX(0x97, loop.y, loop.a & loop.x)
  WRITE_ABS(0x8F, loop.a & loop.x)
  WRITE_INX(0x83, loop.a & loop.x)
  READ_IMM(0x0B, loop.set_nz(loop.a &= value); loop.c = loop.a >> 7)
  READ_IMM(0x2B, loop.set_nz(loop.a &= value); loop.c = loop.a >> 7)
  READ_IMM(0x4B, loop.a = loop.shift_right(loop.a & value, 0))
  READ_IMM(0x6B, loop.rotate_and_add_flags(value))
  READ_IMM(0x8B, loop.set_nz(loop.a = (loop.a | 0xEE) & loop.x & value))
  READ_IMM(0xAB, loop.set_nz(loop.a = loop.x = (loop.a | 0xEE) & value))
  READ_IMM(0xCB, const uint8_t both = loop.a & loop.x; loop.compare(both, value);
           loop.x = static_cast<uint8_t>(both - value))
  READ_ABX(0xBB, loop.y, loop.set_nz(loop.a = loop.x = machine.cpu.sp = machine.cpu.sp & value))
  WRITE_ABX(0x9F, loop.y, loop.a & loop.x & ((address >> 8) + 1))
  WRITE_INY(0x93, loop.a & loop.x & ((address >> 8) + 1))
  WRITE_ABX(0x9E, loop.y, loop.x & ((address >> 8) + 1))
  WRITE_ABX(0x9C, loop.x, loop.y & ((address >> 8) + 1))
  WRITE_ABX(0x9B, loop.y, (machine.cpu.sp = loop.a & loop.x) & ((address >> 8) + 1))
#define NOPS_1(op) OP(op, 1, 2, )
#define NOPS_2(op) OP(op, 2, 2, )
  NOPS_1(0x1A) NOPS_1(0x3A) NOPS_1(0x5A) NOPS_1(0x7A) NOPS_1(0xDA) NOPS_1(0xFA)
  NOPS_2(0x80) NOPS_2(0x82) NOPS_2(0x89) NOPS_2(0xC2) NOPS_2(0xE2)
#undef NOPS_1
#undef NOPS_2
  READ_ZP(0x04, (void)value)
  READ_ZP(0x44, (void)value)
  READ_ZP(0x64, (void)value)
  READ_ZPX(0x14, loop.x, (void)value)
  READ_ZPX(0x34, loop.x, (void)value)
  READ_ZPX(0x54, loop.x, (void)value)
  READ_ZPX(0x74, loop.x, (void)value)
  READ_ZPX(0xD4, loop.x, (void)value)
  READ_ZPX(0xF4, loop.x, (void)value)
  READ_ABS(0x0C, (void)value)
  READ_ABX(0x1C, loop.x, (void)value)
  READ_ABX(0x3C, loop.x, (void)value)
  READ_ABX(0x5C, loop.x, (void)value)
  READ_ABX(0x7C, loop.x, (void)value)
  READ_ABX(0xDC, loop.x, (void)value)
  READ_ABX(0xFC, loop.x, (void)value)
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
    loop.skip_polls(loop.operand >> 8);
    loop.operand = 0x284;
    DISPATCH(load);
  }

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
  machine.cpu.a = loop.a;
  machine.cpu.x = loop.x;
  machine.cpu.y = loop.y;
  machine.cpu.c = loop.c;
  machine.cpu.n = loop.is_negative() ? 0x80 : 0;
  machine.cpu.z = loop.is_zero() ? 0 : 1;
  machine.cpu.pc = static_cast<uint16_t>(loop.pc());
  machine.cpu.cycles = loop.cycles();
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
#undef READ_IMM
#undef READ_ZP
#undef READ_ZPX
#undef READ_ABS
#undef READ_ABX
#undef READ_INX
#undef READ_INY
#undef READ_ALL
#undef WRITE_ZP
#undef WRITE_ZPX
#undef WRITE_ABS
#undef WRITE_ABX
#undef WRITE_INX
#undef WRITE_INY
#undef MODIFY_AT
#undef MODIFY_ZP
#undef MODIFY_ZPX
#undef MODIFY_ABS
#undef MODIFY_ABX
#undef MODIFY_ABY
#undef MODIFY_INX
#undef MODIFY_INY
#undef MODIFY_ALL

BEAST_HD inline void reset_cpu(const Game& game, Machine& machine) {
  machine.cpu = {};
  machine.cpu.sp = 0xFF;
  machine.cpu.z = 1;
  const auto read = [&](uint32_t address) {
    return game.rom[rom_offset(game.info.mapper, machine.cartridge, address)];
  };
  machine.cpu.pc = static_cast<uint16_t>(read(0xFFFC) | read(0xFFFD) << 8);
}

BEAST_HD inline void run_instructions(const Game& game, Machine& machine,
                                      uint8_t* pixels) {
  switch (game.info.mapper) {
    case Mapper::kE0:
    case Mapper::kFE:
      run_cpu<RomView::kSlices>(game, machine, pixels);
      break;
    default:
      run_cpu<RomView::kBanks>(game, machine, pixels);
  }
}

}  // namespace beast::atari
