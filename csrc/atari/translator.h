// SPDX-License-Identifier: Apache-2.0
// Writes a game's program as C++, for translated.h. For the host.
//
// Which bytes are program is found out from the reset vector on, following jumps, and
// by playing for a while: jumps through memory, returns to addresses that were pushed
// by hand and what other banks continue with show only then. What both miss is left to
// the interpreter.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "atari/decode.h"
#include "atari/engine.h"

namespace beast::atari {

// Where the program went on after something else than the instruction before it, or a
// jump that says where to; by offset in the ROM.
struct Arrivals {
  std::vector<bool> at;
};

// Game::run of a game that notes them, one instruction at a time.
inline void run_and_note(const Game& game, Machine& machine, uint8_t* pixels) {
  auto& arrivals = *static_cast<Arrivals*>(game.context);
  const Mapper mapper = game.info.mapper;
  bool arrived = true;
  for (int count = 0; count < kMaxInstructions && !machine.cpu.jammed; ++count) {
    const CartridgeState before = machine.cartridge;
    int opcode = 0;
    if (machine.cpu.pc & 0x1000) {
      const uint32_t at = rom_offset(mapper, before, machine.cpu.pc);
      if (arrived) arrivals.at[at] = true;
      opcode = game.rom[at];
    }
    interpret(game, machine, pixels, kMaxInstructions - 1);
    if (machine.tia.stop) return;
    // BRK, RTI, RTS, JMP through memory; of E0 also JSR and JMP, as slices move.
    arrived = opcode == 0x00 || opcode == 0x40 || opcode == 0x60 || opcode == 0x6C ||
              (mapper == Mapper::kE0 && (opcode == 0x20 || opcode == 0x4C)) ||
              before.bank != machine.cartridge.bank ||
              memcmp(before.slices, machine.cartridge.slices, 4) != 0;
  }
}

// Plays at random, always the same.
inline Arrivals play_and_note(const Game& game, int num_frames) {
  Arrivals arrivals{std::vector<bool>(static_cast<size_t>(game.rom_size))};
  auto noting = std::make_unique<Game>(game);
  noting->run = run_and_note;
  noting->context = &arrivals;
  auto machine = std::make_unique<Machine>();
  auto screens = std::make_unique<Screens>();
  const std::vector<int> actions = minimal_actions(game);
  power_on(*noting, *machine, *screens, 1, 0.0);
  auto random = std::make_unique<Random>();
  seed_random(*random, 1);
  for (int i = 0; i < num_frames; ++i) {
    if (is_over(*machine)) reset_game(*noting, *machine, *screens);
    act(*noting, *machine, *screens, actions[next_random(*random) % actions.size()],
        false);
  }
  return arrivals;
}

class Translator {
 public:
  Translator(const Game& game, const Arrivals& arrivals)
      : game_(game),
        mapper_(game.info.mapper),
        window_(mapper_ == Mapper::kE0 ? 1024 : Game::kBank),
        num_ways_to_(static_cast<size_t>(game.rom_size)),
        reached_(num_ways_to_.size()),
        is_entry_(num_ways_to_.size()) {
    switch (mapper_) {
      case Mapper::k2K:
      case Mapper::k4K:
      case Mapper::kF8:
      case Mapper::kF6:
      case Mapper::kE0:
      case Mapper::kFE:
      case Mapper::kF8SC:
      case Mapper::kF6SC:
        break;
      default:
        throw std::invalid_argument(std::string(game.info.name) +
                                    ": no translation of this kind of cartridge");
    }
    CartridgeState cartridge = {};
    Random random = {};
    reset_cartridge(mapper_, cartridge, random);
    const auto byte = [&](uint32_t address) {
      return game_.rom[rom_offset(mapper_, cartridge, address)];
    };
    const uint32_t reset = byte(0xFFFC) | static_cast<uint32_t>(byte(0xFFFD)) << 8;
    enter(static_cast<int>(rom_offset(mapper_, cartridge, reset)));
    for (int at = 0; at < game.rom_size; ++at) {
      if (arrivals.at[static_cast<size_t>(at)]) enter(at);
    }
    while (!to_visit_.empty()) {
      const int at = to_visit_.back();
      to_visit_.pop_back();
      visit(at);
    }
  }

  // The whole file.
  std::string write() const {
    std::string text;
    add(text, "// Translated from %s by libatari; not to be edited.\n",
        game_.info.name);
    text +=
        "#include \"atari/translated.h\"\n\nnamespace beast::atari {\nnamespace {\n\n";
    add(text,
        "struct Rom {\n  static constexpr Mapper kMapper = static_cast<Mapper>(%d);\n",
        static_cast<int>(mapper_));
    add(text, "  static constexpr uint8_t kFlags = %d;\n", game_.info.flags);
    text += "  static constexpr uint8_t kBytes[] = {";
    for (int at = 0; at < game_.rom_size; ++at) {
      add(text, "%s%d,", at % 24 == 0 ? "\n      " : "", game_.rom[at]);
    }
    text += "};\n};\n\n// Which case each offset is; 0 where there is none.\n";
    text += "constexpr uint16_t kCases[] = {";
    std::string entries, cases;
    int num_entries = 0;
    for (int at = 0; at < game_.rom_size; ++at) {
      const bool entry = is_entry(at);
      if (entry) {
        ++num_entries;
        add(entries, "%s%d,", num_entries % 16 == 1 ? "\n    " : "", at);
        add(cases, "    case %d: goto at_%04X;\n", num_entries, at);
      }
      add(text, "%s%d,", at % 24 == 0 ? "\n    " : "", entry ? num_entries : 0);
    }
    text += "};\n\nconstexpr uint16_t kEntries[] = {" + entries + "};\n\n";
    text +=
        "uint32_t run(Machine* machine, uint8_t* pixels, uint32_t count) {\n"
        "  Translated<Rom> loop(*machine, pixels, count);\n"
        "  uint32_t pc = machine->cpu.pc;\n"
        "dispatch:\n"
        "  loop.switched = false;\n"
        "  if (!(pc & 0x1000) || loop.is_near_the_limit()) goto leave;\n";
    add(text, "  loop.upper = pc & 0x%X;\n", 0x10000 - window_);
    text += "  switch (kCases[rom_offset(Rom::kMapper, machine->cartridge, pc)]) {\n" +
            cases + "    default: goto leave;\n  }\n";
    for (int at = 0; at < game_.rom_size; ++at) {
      if (is_leader(at)) write_block(text, at);
    }
    text +=
        "leave:\n"
        "  loop.save(pc);\n"
        "  return static_cast<uint32_t>(loop.time & 0xFFFF);\n"
        "}\n\n}  // namespace\n}  // namespace beast::atari\n\n"
        "extern \"C\" __attribute__((visibility(\"default\")))\n"
        "const beast::atari::Translation beast_atari_translation = {\n"
        "    beast::atari::kTranslationVersion, sizeof(beast::atari::Machine),\n";
    add(text, "    %d, beast::atari::Rom::kBytes, %d, beast::atari::kEntries, ",
        game_.rom_size, num_entries);
    text += "beast::atari::run};\n";
    return text;
  }

 private:
  template <class... Values>
  static void add(std::string& text, const char* format, Values... values) {
    char line[256];
    const int size = std::snprintf(line, sizeof line, format, values...);
    text.append(line, static_cast<size_t>(size));
  }

  Instruction code(int at) const { return game_.code[Game::kMargin + at]; }
  int opcode(int at) const { return game_.rom[at]; }
  int length(int at) const { return instruction_length(opcode(at)); }
  int place(int at) const { return at % window_; }
  // Of an instruction with two bytes behind its opcode.
  uint32_t operand(int at) const {
    return game_.rom[at + 1] | static_cast<uint32_t>(game_.rom[at + 2]) << 8;
  }
  // What the interpreter decodes when it runs, and what is too rare: BRK, RTI, those
  // that stop the CPU, and the last bytes of a window.
  bool can_translate(int at) const {
    const int op = opcode(at);
    const bool jams = (op & 0x1F) == 0x12 || ((op & 0x9F) == 0x02);
    return handler_of(code(at)) != kDecodeNow && op != 0x00 && op != 0x40 && !jams &&
           place(at) + length(at) < window_;
  }
  // The offset that JMP or JSR at `at` goes to, or -1 where that depends.
  int target_of(int at) const {
    const uint32_t address = operand(at);
    if (!(address & 0x1000)) return -1;
    CartridgeState cartridge = {};
    cartridge.bank = static_cast<uint8_t>(at / Game::kBank);
    cartridge.slices[3] = 7;
    if (mapper_ == Mapper::kE0 && (address >> 10 & 3) != 3) return -1;
    return static_cast<int>(rom_offset(mapper_, cartridge, address));
  }
  int branch_target(int at) const {
    return at + 2 + static_cast<int8_t>(game_.rom[at + 1]);
  }
  // The offset at which the program goes on in another bank, or -1: after an access to
  // an address that is known to switch.
  int continues_at(int at) const {
    const bool absolute = (opcode(at) & 0x1C) == 0x0C;
    if (!absolute || is_jump(opcode(at)) || mapper_ == Mapper::kE0) return -1;
    const uint32_t address = operand(at);
    if (!(address & 0x1000) || !is_hotspot(mapper_, address)) return -1;
    const auto bank = static_cast<int>((address & 0xFFF) - first_hotspot_of(mapper_));
    return bank * Game::kBank + place(at) + length(at);
  }
  // JSR, JMP, RTS, JMP through memory.
  static bool is_jump(int op) {
    return op == 0x20 || op == 0x4C || op == 0x60 || op == 0x6C;
  }
  bool ends_block(int at) const { return is_jump(opcode(at)) || continues_at(at) >= 0; }

  // Jumps that are not are within a bank, so there are fewer of them in a row than
  // instructions between is_near_the_limit() and the limit.
  static bool is_backward(int at, int target) {
    return target <= at || target / Game::kBank != at / Game::kBank;
  }

  bool is_leader(int at) const {
    const auto i = static_cast<size_t>(at);
    return reached_[i] && (is_entry_[i] || num_ways_to_[i] > 1);
  }
  // Where run() can begin: not at every label, as each takes the compiler time.
  bool is_entry(int at) const {
    return is_entry_[static_cast<size_t>(at)] && can_translate(at);
  }

  void reach(int at, int ways) {
    const auto i = static_cast<size_t>(at);
    num_ways_to_[i] += ways;
    if (reached_[i]) return;
    reached_[i] = true;
    to_visit_.push_back(at);
  }
  void enter(int at) {
    is_entry_[static_cast<size_t>(at)] = true;
    reach(at, 2);
  }
  void visit(int at) {
    if (!can_translate(at)) return;
    const int op = opcode(at);
    if (is_branch(op)) reach(branch_target(at), 2);
    if (op == 0x4C || op == 0x20) {
      if (const int target = target_of(at); target >= 0) reach(target, 2);
    }
    if (op == 0x20) enter(at + 3);
    if (const int other = continues_at(at); other >= 0) reach(other, 2);
    if (mapper_ == Mapper::kE0 && may_switch(at)) enter(at + length(at));
    if (!ends_block(at)) reach(at + length(at), 1);
  }

  void write_block(std::string& text, int at) const {
    add(text, "at_%04X:\n", at);
    if (mapper_ != Mapper::kE0 && mapper_ != Mapper::kFE &&
        game_.rom_size > Game::kBank) {
      add(text, "  loop.rom = Rom::kBytes + 0x%X;\n", at / Game::kBank * Game::kBank);
    }
    for (;;) {
      if (!can_translate(at)) {
        add(text, "  BEAST_LEAVE(0x%X)\n", place(at));
        return;
      }
      write_instruction(text, at);
      if (ends_block(at)) return;
      at += length(at);
      if (is_leader(at)) break;
    }
    // Most often the next block, so that this is nothing.
    add(text, "  goto at_%04X;\n", at);
  }

  void write_instruction(std::string& text, int at) const {
    const int op = opcode(at);
    const int next = place(at) + length(at);
    const uint32_t handler = handler_of(code(at));
    if (is_branch(op)) return write_branch(text, at);
    if (op == 0x4C || op == 0x20) return write_jump(text, at);
    if (op == 0x60) {
      text += "  BEAST_RETURN()\n";
      return;
    }
    if (op == 0x6C) {
      const uint32_t low = operand(at);
      add(text, "  BEAST_JUMP_THROUGH(0x%X, 0x%X)\n", low,
          (low & 0xFF00) | ((low + 1) & 0xFF));
      return;
    }
    if (handler >= kStoreATia && handler <= kStoreWsync) {
      const char reg = op == 0x85 ? 'a' : op == 0x86 ? 'x' : 'y';
      add(text, "  BEAST_STORE(0x%02X, loop.%c, 0x%X)\n", game_.rom[at + 1] & 0x3F, reg,
          next);
      return;
    }
    if (handler == kPollTimer) {
      add(text, "  BEAST_POLL(0x%02X, 0x%X)\n", opcode(at + 3), place(at));
    }
    const uint32_t value = length(at) == 1   ? 0
                           : length(at) == 2 ? game_.rom[at + 1]
                                             : operand(at);
    if (const int other = continues_at(at); other >= 0) {
      add(text, "  BEAST_RUN_TO(0x%02X, 0x%X, 0x%X, at_%04X)\n", op, value, next,
          other);
      return;
    }
    add(text, "  BEAST_RUN%s(0x%02X, 0x%X, 0x%X)\n", may_switch(at) ? "_FAR" : "", op,
        value, next);
  }

  // Whether it may access one of the addresses that switch banks.
  bool may_switch(int at) const {
    if (num_hotspots_of(mapper_) == 0 || is_jump(opcode(at))) return false;
    if (length(at) < 3) return (opcode(at) & 0x0D) == 0x01;  // Through a pointer.
    const bool indexed = opcode(at) & 0x10;
    for (uint32_t i = 0; i <= (indexed ? 0xFF : 0); ++i) {
      const uint32_t address = operand(at) + i;
      if ((address & 0x1000) && is_hotspot(mapper_, address)) return true;
    }
    return false;
  }

  void write_branch(std::string& text, int at) const {
    static const char* const kConditions[8] = {"!loop.is_negative()",
                                               "loop.is_negative()",
                                               "!machine->cpu.v",
                                               "machine->cpu.v",
                                               "!loop.c",
                                               "loop.c",
                                               "!loop.is_zero()",
                                               "loop.is_zero()"};
    const int target = branch_target(at);
    const uint32_t more =
        branch_operand(game_.rom[at + 1], static_cast<uint32_t>(at)) >> 8;
    add(text, "  loop.tick(2);\n  if (%s) {\n    loop.wait(%d);\n",
        kConditions[opcode(at) >> 5], more);
    if (is_backward(at, target))
      add(text, "    BEAST_CHECK_LIMIT(0x%X)\n", place(target));
    add(text, "    goto at_%04X;\n  }\n", target);
  }

  void write_jump(std::string& text, int at) const {
    const uint32_t address = operand(at);
    if (opcode(at) == 0x20) {
      add(text, "  BEAST_CALL(0x%X, 0x%X)\n", place(at) + 2, address);
    } else {
      text += "  loop.tick(3);\n";
    }
    const int target = target_of(at);
    if (target < 0) {
      add(text, "  pc = 0x%X;\n  goto dispatch;\n", address);
      return;
    }
    add(text, "  loop.upper = 0x%X;\n",
        address & static_cast<uint32_t>(0x10000 - window_));
    if (is_backward(at, target))
      add(text, "  BEAST_CHECK_LIMIT(0x%X)\n", place(target));
    add(text, "  goto at_%04X;\n", target);
  }

  const Game& game_;
  const Mapper mapper_;
  const int window_;
  // Per offset: jumps count twice, so that what has more than one begins a block.
  std::vector<int> num_ways_to_;
  std::vector<bool> reached_, is_entry_;
  std::vector<int> to_visit_;
};

}  // namespace beast::atari
