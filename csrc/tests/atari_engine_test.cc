// SPDX-License-Identifier: Apache-2.0
// The Atari engine without Python and without ROMs: small programs of our own, and
// random bytes, which find what leaves its memory. With BEAST_ATARI_ROMS naming the
// directory of ale_py's ROMs all games run too.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "atari/engine.h"
#include "check.h"

namespace beast::atari {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr GameInfo kSynthetic = {GameId::pong, "synthetic", "",    Mapper::k4K, 1, 34,
                                 210,          kJoysticks,  kNoop, 0,           {}};

struct Environment {
  explicit Environment(const Bytes& rom, GameInfo info = kSynthetic)
      : game(make_game(info, rom)),
        machine(std::make_unique<Machine>()),
        screens(std::make_unique<Screens>()) {
    std::memset(static_cast<void*>(machine.get()), 0, sizeof(Machine));
    seed_random(machine->console_random, 1);
    machine->controls.port_a = 0xFF;
    machine->controls.switches = kSwitchesB;
    machine->controls.paddles[0] = machine->controls.paddles[1] = kPaddleCenter;
    reset_system(*game, *machine, *screens);
  }
  void frame(bool draw = true) { run_frame(*game, *machine, *screens, draw, false); }
  void frame_in_two_phases(TiaLog& log) {
    run_frame(*game, *machine, *screens, false, false, &log);
    draw_log(log);
  }
  int ram(int address) const { return machine->riot.ram[address & 0x7F]; }

  std::unique_ptr<Game> game;
  std::unique_ptr<Machine> machine;
  std::unique_ptr<Screens> screens;
};

// Runs the program, then two lines of VSYNC, then hangs; 4K from F000.
Bytes assemble(const Bytes& program) {
  Bytes rom(4096, 0xEA);
  const Bytes ending = {0xA9, 0x02, 0x85, 0x00, 0x85, 0x02, 0x85, 0x02, 0x85,
                        0x02, 0xA9, 0x00, 0x85, 0x00, 0x4C, 0x00, 0xF8};
  std::copy(program.begin(), program.end(), rom.begin());
  std::copy(ending.begin(), ending.end(), rom.begin() + program.size());
  rom[0x800] = 0x4C;  // JMP F800
  rom[0x801] = 0x00;
  rom[0x802] = 0xF8;
  rom[0xFFC] = 0x00;
  rom[0xFFD] = 0xF0;
  return rom;
}

Environment run(const Bytes& program) {
  Environment environment(assemble(program));
  environment.frame();
  CHECK(!environment.machine->tia.partial);
  return environment;
}

TEST(adds_and_subtracts_in_binary_and_decimal) {
  const Environment e = run({
      0x18, 0xA9, 0x7F, 0x69, 0x01, 0x85, 0x80,        // 7F + 1
      0x08, 0x68, 0x85, 0x81,                          // its flags
      0xF8, 0x38, 0xA9, 0x58, 0x69, 0x46, 0x85, 0x82,  // 58 + 46 + 1, decimal
      0x38, 0xA9, 0x12, 0xE9, 0x21, 0x85, 0x83,        // 12 - 21, decimal
      0xD8,
  });
  CHECK_EQ(e.ram(0x80), 0x80);
  CHECK_EQ(e.ram(0x81) & 0xC3, 0xC0);  // Negative, overflow; no zero, no carry.
  CHECK_EQ(e.ram(0x82), 0x05);
  CHECK_EQ(e.ram(0x83), 0x91);
}

TEST(runs_undocumented_opcodes) {
  const Environment e = run({
      0xA9, 0x3C, 0x85, 0x90, 0xA7, 0x90, 0x86, 0x80,  // LAX
      0xA9, 0x0F, 0xA2, 0xFC, 0x87, 0x81,              // SAX
      0xA9, 0x10, 0x85, 0x82, 0xC7, 0x82,              // DCP
      0x38, 0xA9, 0x20, 0xE7, 0x82, 0x85, 0x83,        // ISB
  });
  CHECK_EQ(e.ram(0x80), 0x3C);
  CHECK_EQ(e.ram(0x81), 0x0C);
  CHECK_EQ(e.ram(0x82), 0x10);
  CHECK_EQ(e.ram(0x83), 0x10);
}

TEST(calls_and_returns_and_jumps_through_memory) {
  Bytes program(0x60, 0xEA);
  const Bytes start = {0xA2, 0xFF, 0x9A, 0x20, 0x20, 0xF0, 0xA9, 0x30, 0x85,
                       0x90, 0xA9, 0xF0, 0x85, 0x91, 0x6C, 0x90, 0x00};
  std::copy(start.begin(), start.end(), program.begin());
  const Bytes subroutine = {0xA9, 0x77, 0x85, 0x80, 0x60};
  std::copy(subroutine.begin(), subroutine.end(), program.begin() + 0x20);
  program[0x30] = 0xE6;  // INC 80
  program[0x31] = 0x80;
  CHECK_EQ(run(program).ram(0x80), 0x78);
}

TEST(counts_a_cycle_more_where_an_indexed_read_crosses_a_page) {
  // The timer counts cycles: it is read before and after.
  const auto measure = [](uint8_t low) {
    const Environment e = run({0xA2, 0x01, 0xA9, 0xFF, 0x8D, 0x94, 0x02, 0xBD, low,
                               0xF1, 0xAD, 0x84, 0x02, 0x85, 0x80});
    return e.ram(0x80);
  };
  CHECK_EQ(measure(0x00) - measure(0xFF), 1);
}

TEST(a_program_that_hangs_ends_its_frame_after_25000_instructions) {
  Environment e(assemble({}));
  e.frame();
  CHECK(!e.machine->tia.partial);
  e.frame();
  CHECK(e.machine->tia.partial);
  const int32_t cycles = e.machine->cpu.cycles;
  e.frame();
  CHECK_EQ(e.machine->cpu.cycles - cycles, 3 * kMaxInstructions);
}

TEST(a_full_log_is_drawn_and_goes_on) {
  // Two colours in turn for ever: 290 lines, which end a frame, are 5,900 writes.
  const Bytes rom = assemble({0xA2, 0x44, 0xA0, 0x86, 0x86, 0x09, 0x84, 0x09, 0x86,
                              0x09, 0x84, 0x09, 0x4C, 0x04, 0xF0});
  Environment one(rom), two(rom);
  const auto log = std::make_unique<TiaLog>();
  for (int frame = 0; frame < 4; ++frame) {
    one.frame();
    two.frame_in_two_phases(*log);
    CHECK(std::memcmp(one.screens.get(), two.screens.get(), sizeof(Screens)) == 0);
  }
  const uint8_t* last_row = one.screens->pixels[0] + 209 * kWidth;
  CHECK(std::count(last_row, last_row + kWidth, 0x44) > 0);
  CHECK(std::count(last_row, last_row + kWidth, 0x86) > 0);
}

TEST(a_jammed_cpu_stays_so) {
  Environment e(assemble({0x02}));
  for (int i = 0; i < 3; ++i) e.frame();
  CHECK(e.machine->cpu.jammed);
}

TEST(all_ways_to_paint_give_the_same_pixels) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const Layers layers{random(), random() & random(), random() & random()};
    const LayerColors colors{
        static_cast<uint8_t>(random()), static_cast<uint8_t>(random()),
        static_cast<uint8_t>(random()), static_cast<uint8_t>(random())};
    int begin = static_cast<int>(random() % 64), end = static_cast<int>(random() % 64);
    if (begin > end) std::swap(begin, end);
    const uint64_t range = word_range(begin, end + 1, 0);
    uint8_t expected[64] = {}, pixels[64] = {};
    for (int i = begin; i <= end; ++i) {
      expected[i] = layers.high >> i & 1     ? colors.high
                    : layers.middle >> i & 1 ? colors.middle
                    : layers.low >> i & 1    ? colors.low
                                             : colors.background;
    }
    paint_plain(pixels, range, layers, colors);
    CHECK(std::memcmp(pixels, expected, 64) == 0);
#if defined(BEAST_X86_SIMD)
    if (__builtin_cpu_supports("avx2")) {
      std::memset(pixels, 0, 64);
      paint_avx2(pixels, range, layers, colors);
      CHECK(std::memcmp(pixels, expected, 64) == 0);
    }
    if (__builtin_cpu_supports("avx512bw")) {
      std::memset(pixels, 0, 64);
      paint_avx512(pixels, range, layers, colors);
      CHECK(std::memcmp(pixels, expected, 64) == 0);
    }
#endif
  }
}

// Random bytes with a bias to what touches the TIA; whatever they do must stay inside,
// must not depend on whether it is drawn, and look the same when drawn from a log.
TEST(random_programs_stay_inside_their_memory_and_need_no_drawing) {
  std::mt19937 random(1);
  const Mapper mappers[] = {Mapper::k2K, Mapper::k4K, Mapper::kF8,   Mapper::kF6,
                            Mapper::kE0, Mapper::kFE, Mapper::kF8SC, Mapper::kF6SC};
  const int rounds = 40 * test::from_environment("BEAST_ROUNDS", 3);
  const auto log = std::make_unique<TiaLog>();
  for (int round = 0; round < rounds; ++round) {
    GameInfo info = kSynthetic;
    info.mapper = mappers[round % std::size(mappers)];
    info.flags = static_cast<uint8_t>(round % 4 == 0 ? kPaddles | kSwappedPaddles : 0);
    Bytes rom(static_cast<size_t>(rom_size_of(info.mapper)));
    for (size_t i = 0; i < rom.size(); ++i) {
      rom[i] = static_cast<uint8_t>(random());
      if (i + 1 < rom.size() && random() % 4 == 0) {
        rom[i++] = random() % 2 ? 0x85 : 0x86;  // STA, STX to the TIA
        rom[i] = random() % 0x2D;
      } else if (rom[i] % 32 == 0x12 || (rom[i] & 0x9F) == 0x02) {
        rom[i] = 0xEA;  // Not those that stop the CPU.
      }
    }
    Environment drawn(rom, info), undrawn(rom, info), in_two(rom, info);
    for (int frame = 0; frame < 20; ++frame) {
      const int action = static_cast<int>(random() % kNumActions);
      press(*drawn.game, drawn.machine->controls, action, 0);
      press(*undrawn.game, undrawn.machine->controls, action, 0);
      press(*in_two.game, in_two.machine->controls, action, 0);
      drawn.frame(true);
      in_two.frame_in_two_phases(*log);
      CHECK(std::memcmp(in_two.screens.get(), drawn.screens.get(), sizeof(Screens)) ==
            0);
      CHECK(std::memcmp(drawn.machine->riot.ram, in_two.machine->riot.ram, 128) == 0);
      CHECK_EQ(drawn.machine->cpu.cycles, in_two.machine->cpu.cycles);
      undrawn.frame(frame % 4 >= 2);
      CHECK(std::memcmp(drawn.machine->riot.ram, undrawn.machine->riot.ram, 128) == 0);
      CHECK_EQ(drawn.machine->cpu.pc, undrawn.machine->cpu.pc);
      CHECK_EQ(drawn.machine->cpu.cycles, undrawn.machine->cpu.cycles);
      CHECK(is_valid(*drawn.game, *drawn.machine));
    }
  }
}

TEST(real_games_run_where_there_are_roms) {
  const char* directory = std::getenv("BEAST_ATARI_ROMS");
  if (!directory) return;
  for (const std::string& name : supported_games()) {
    std::ifstream file(std::filesystem::path(directory) / (name + ".bin"),
                       std::ios::binary);
    const Bytes rom((std::istreambuf_iterator<char>(file)), {});
    const auto game = load_game(rom, name);
    const auto machine = std::make_unique<Machine>();
    const auto screens = std::make_unique<Screens>();
    power_on(*game, *machine, *screens, 1, 0.25);
    std::mt19937 random(1);
    for (int frame = 0; frame < 300; ++frame) {
      act(*game, *machine, *screens, static_cast<int>(random() % kNumActions),
          frame % 4 >= 2);
      if (is_over(*machine)) reset_game(*game, *machine, *screens);
    }
    CHECK(is_valid(*game, *machine));
  }
}

TEST(unknown_names_and_bytes_are_refused) {
  CHECK_THROWS(std::invalid_argument, load_game(Bytes(4096), "no_such_game"),
               "no game named");
  CHECK_THROWS(std::invalid_argument, load_game(Bytes(2048), "pong"), "MD5");
  CHECK_THROWS(std::invalid_argument, make_game(kSynthetic, Bytes(100)),
               "expected 4096");
  CHECK_EQ(md5(Bytes{}), "d41d8cd98f00b204e9800998ecf8427e");
}

}  // namespace
}  // namespace beast::atari
