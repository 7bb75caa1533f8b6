// SPDX-License-Identifier: Apache-2.0
// The console around the chips: frames, controllers and switches, boot and reset, modes
// and sticky actions. The order of all this is ale-py's, since RAM and both streams of
// random numbers outlive resets.
#pragma once

#include <cstdint>
#include <cstring>

#include "atari/cartridge.h"
#include "atari/cpu.h"
#include "atari/game.h"
#include "atari/games.h"
#include "atari/machine.h"
#include "atari/platform.h"
#include "atari/random.h"
#include "atari/riot.h"
#include "atari/tia.h"

namespace beast::atari {

inline constexpr uint8_t kSwitchesB = 0x3F;  // Nothing pressed, colour, difficulty B.
inline constexpr uint8_t kSwitchesA = 0xFF;
inline constexpr uint8_t kResetSwitch = 0x01, kSelectSwitch = 0x02;

inline constexpr int kPaddleMin = 27450, kPaddleMax = 790196, kPaddleStep = 23000;
inline constexpr int kPaddleCenter = (kPaddleMin + kPaddleMax) / 2;

BEAST_HD inline TiaWindow window_of(const Game& game, bool pal) {
  return {game.info.first_line, game.info.height, pal ? 342 : 290,
          !(game.info.flags & kNoHmoveBlanks), pal};
}

// Runs the machine for one frame; the controls stay as they are. With a log the frame
// is not drawn: draw_log does that.
BEAST_HD inline void run_frame(const Game& game, Machine& machine, Screens& screens,
                               bool draw, bool pal, TiaLog* log = nullptr) {
  TiaState& tia = machine.tia;
  tia.drawing = log ? kLogged : draw ? kDrawn : kUndrawn;
  // A program that hangs gets partial frames for ever: its clock must not overflow.
  const bool begins = !tia.partial || machine.cpu.cycles > 100'000'000;
  if (begins) {
    const int32_t shift = start_frame(tia, window_of(game, pal), machine.cpu.cycles);
    machine.cpu.cycles -= shift;
    machine.riot.set_at -= shift;
    machine.riot.read_at -= shift;
  }
  tia.partial = 1;
  tia.stop = 0;
  uint8_t* pixels = screens.pixels[tia.buffer];
  if (log) {
    start_log(*log, tia, pixels);
    pixels = reinterpret_cast<uint8_t*>(log);
  }
  run_instructions(game, machine, pixels);
  if (tia.stop) {
    look(tia, pixels, machine.cpu.cycles);
  } else if (begins) {  // Those that go on stay as grey as they are.
    cut_off(tia, pixels, machine.cpu.cycles);
  }
}

BEAST_HD inline void reset_system(const Game& game, Machine& machine,
                                  Screens& screens) {
  reset_riot(machine.riot, machine.console_random);
  reset_tia(machine.tia, screens);
  reset_cartridge(game.info.mapper, machine.cartridge, machine.console_random);
  reset_cpu(game, machine);
}

// Bits of a port's four pins: up, down, left, right.
BEAST_HD inline int directions_of(int action) {
  const auto in = [action](uint32_t set) {
    return static_cast<int>(set >> action & 1);
  };
  const uint32_t up = 1 << kUp | 1 << kUpRight | 1 << kUpLeft | 1 << kUpFire |
                      1 << kUpRightFire | 1 << kUpLeftFire;
  const uint32_t down = 1 << kDown | 1 << kDownRight | 1 << kDownLeft | 1 << kDownFire |
                        1 << kDownRightFire | 1 << kDownLeftFire;
  const uint32_t left = 1 << kLeft | 1 << kUpLeft | 1 << kDownLeft | 1 << kLeftFire |
                        1 << kUpLeftFire | 1 << kDownLeftFire;
  const uint32_t right = 1 << kRight | 1 << kUpRight | 1 << kDownRight |
                         1 << kRightFire | 1 << kUpRightFire | 1 << kDownRightFire;
  return in(up) | in(down) << 1 | in(left) << 2 | in(right) << 3;
}

BEAST_HD inline bool has_fire(int action) {
  return action == kFire || action >= kUpFire;
}

// Player B does nothing: there is one agent.
BEAST_HD inline void press(const Game& game, ControlsState& controls, int action,
                           uint8_t switches_pressed) {
  const uint8_t flags = game.info.flags;
  const int directions = directions_of(action);
  controls.switches = static_cast<uint8_t>(kSwitchesB & ~switches_pressed);
  controls.fire[0] = controls.fire[1] = 0;
  if (flags & kPaddles) {
    int32_t& resistance = controls.paddles[0];
    if (directions & 8) resistance -= kPaddleStep;
    if (directions & 4) resistance += kPaddleStep;
    if (resistance < kPaddleMin) resistance = kPaddleMin;
    if (resistance > kPaddleMax) resistance = kPaddleMax;
    const int button = flags & kSwappedPaddles ? 0x40 : 0x80;
    controls.port_a = static_cast<uint8_t>(has_fire(action) ? ~button : 0xFF);
    return;
  }
  const bool right_port = flags & kSwappedPorts;
  controls.port_a = static_cast<uint8_t>(~(right_port ? directions : directions << 4));
  controls.fire[right_port] = has_fire(action);
}

// A frame with an action, after which the rules look.
BEAST_HD inline void emulate(const Game& game, Machine& machine, Screens& screens,
                             int action, uint8_t switches_pressed, bool draw,
                             TiaLog* log = nullptr) {
  press(game, machine.controls, action, switches_pressed);
  run_frame(game, machine, screens, draw, game.pal, log);
  step_rules(game.info, machine.riot.ram, machine.rules);
}

BEAST_HD inline void emulate_many(const Game& game, Machine& machine, Screens& screens,
                                  int count, int action, uint8_t switches_pressed) {
  for (int i = 0; i < count; ++i) {
    emulate(game, machine, screens, action, switches_pressed, true);
  }
}

BEAST_HD inline void soft_reset(const Game& game, Machine& machine, Screens& screens) {
  emulate_many(game, machine, screens, 4, kNoop, kResetSwitch);
}

BEAST_HD inline void count_frame(Machine& machine) {
  ++machine.frame_number;
  ++machine.episode_frame_number;
}

BEAST_HD inline void press_select(const Game& game, Machine& machine, Screens& screens,
                                  int frames) {
  press(game, machine.controls, kNoop, kSelectSwitch);
  for (int i = 0; i < frames; ++i) run_frame(game, machine, screens, true, game.pal);
  emulate(game, machine, screens, kNoop, 0, true);
  count_frame(machine);
}

BEAST_HD inline int act(const Game& game, Machine& machine, Screens& screens,
                        int action, bool draw, TiaLog* log) {
  if (log) log->count = 0;  // Should nothing run.
  // Two draws per frame, whatever the probability.
  const double scale = 1.0 / 4294967296.0;
  if (next_random(machine.sticky_random) * scale >= machine.sticky_probability) {
    machine.actions[0] = static_cast<uint8_t>(action);
  }
  next_random(machine.sticky_random);  // Player B's.
  if (machine.rules.terminal) return 0;
  int accepted = machine.actions[0];
  if (game.info.id == GameId::skiing && has_fire(accepted)) accepted = kNoop;
  emulate(game, machine, screens, accepted, 0,
          draw || (game.info.flags & kShortFrames) != 0, log);
  count_frame(machine);
  return machine.rules.reward;
}

// The menu of double_dunk: past its first two lines, then four options, all off;
// the start action leaves it.
BEAST_HD inline void walk_menu(const Game& game, Machine& machine, Screens& screens) {
  const uint8_t* ram = machine.riot.ram;
  const auto tap = [&](int action) {
    act(game, machine, screens, action, true);
    act(game, machine, screens, kNoop, true);
  };
  const auto down = [&]() {
    const uint8_t line = ram[0xB0 & 0x7F];
    for (int i = 0; i < 1000 && ram[0xB0 & 0x7F] == line; ++i) tap(kDown);
  };
  const auto switch_off = [&](uint8_t option) {
    for (int i = 0; i < 1000 && (ram[0x80 & 0x7F] & option); ++i) tap(kLeft);
  };
  press_select(game, machine, screens, game.info.mode.select_frames);
  down();
  for (const uint8_t option : {0x08, 0x10, 0x04, 0x20}) {
    down();
    switch_off(option);
  }
  soft_reset(game, machine, screens);
  tap(kUpFire);
}

// Presses SELECT until the game is in the mode that ale-py starts with.
BEAST_HD inline void select_mode(const Game& game, Machine& machine, Screens& screens) {
  const ModeRule& mode = game.info.mode;
  const uint8_t* ram = machine.riot.ram;
  if (mode.select_frames == 0) return;
  switch (game.info.id) {
    case GameId::berzerk:
      for (int i = 0; i < 20; ++i) act(game, machine, screens, kNoop, true);
      break;
    case GameId::gopher:
      soft_reset(game, machine, screens);
      break;
    case GameId::yars_revenge:
    case GameId::pooyan:
      press_select(game, machine, screens, 2);
      break;
    case GameId::air_raid:
      press_select(game, machine, screens, 20);
      break;
    case GameId::double_dunk:
      walk_menu(game, machine, screens);
      return;
    default:
      break;
  }
  const auto is_set = [&]() {
    const uint8_t now = ram[mode.address & 0x7F];
    if (now == mode.value) {
      return game.info.id != GameId::ms_pacman || ram[0xA1 & 0x7F] == 1;
    }
    return (game.info.id == GameId::jamesbond && now == 0x48) ||
           (game.info.id == GameId::kangaroo && now == 0x80);
  };
  // The bound is for a ROM that never gets there: known ones need 134 at most.
  for (int i = 0; i < 1000 && !is_set(); ++i) {
    press_select(game, machine, screens, mode.select_frames);
  }
  soft_reset(game, machine, screens);
}

BEAST_HD inline void reset_game(const Game& game, Machine& machine, Screens& screens) {
  machine.episode_frame_number = 0;
  machine.actions[0] = machine.actions[1] = kNoop;
  machine.controls.paddles[0] = machine.controls.paddles[1] = kPaddleCenter;
  reset_system(game, machine, screens);
  emulate_many(game, machine, screens, 60, kNoop, 0);
  soft_reset(game, machine, screens);
  reset_rules(game.info, machine.rules);
  select_mode(game, machine, screens);
  soft_reset(game, machine, screens);
  emulate_many(game, machine, screens, game.info.num_start_actions,
               game.info.start_action, 0);
  machine.actions[0] = machine.actions[1] = kNoop;
}

BEAST_HD inline void power_on(const Game& game, Machine& machine, Screens& screens,
                              uint32_t seed, double sticky_probability) {
  memset(static_cast<void*>(&machine), 0, sizeof(machine));
  seed_random(machine.console_random, 4753849);
  for (uint8_t& byte : machine.riot.ram) {
    byte = static_cast<uint8_t>(next_random(machine.console_random));
  }
  next_random(machine.console_random);  // A timer that the reset sets again.
  machine.controls = {};
  machine.controls.port_a = 0xFF;
  machine.controls.switches = game.info.flags & kDifficultyA ? kSwitchesA : kSwitchesB;
  reset_system(game, machine, screens);
  // Here ale-py counts lines to tell NTSC from PAL; the table knows, RAM remembers.
  for (int i = 0; i < 60; ++i) run_frame(game, machine, screens, true, false);
  reset_system(game, machine, screens);

  seed_random(machine.sticky_random, seed);
  machine.sticky_probability = sticky_probability;
  reset_game(game, machine, screens);
}

// Whether a machine that came from outside, say from a file, can be run: whatever else
// its bytes are, no access leaves the memory that is ours.
BEAST_HD inline bool is_valid(const Game& game, const Machine& machine) {
  const TiaState& tia = machine.tia;
  const RiotState& riot = machine.riot;
  const auto is_random = [](const Random& random) {
    return random.index >= 0 && random.index <= Random::kSize;
  };
  const auto is_time = [](int32_t time) {
    return time >= -1'000'000'000 && time <= 1'000'000'000;
  };
  bool valid = is_random(machine.sticky_random) && is_random(machine.console_random);
  for (int i = 0; i < 4 && game.info.mapper == Mapper::kE0; ++i) {
    valid = valid && machine.cartridge.slices[i] < game.rom_size / 1024;
  }
  valid = valid && machine.cartridge.bank < game.rom_size / Game::kBank;
  for (int i = 0; i < kNumObjects; ++i) valid = valid && tia.position[i] < kWidth;
  for (int i = 0; i < 5; ++i) valid = valid && tia.hm[i] < 16;
  valid = valid && tia.enabled < 64 && tia.star_line < 4 && tia.buffer < 2;
  // Where the line and its row are: both follow from one another.
  valid = valid && is_time(tia.drawn_to) && tia.row >= 0 &&
          tia.row < game.info.height &&
          tia.line_end == kLineClocks * (game.info.first_line + tia.row + 1) &&
          tia.drawn_to <= tia.line_end && tia.drawn_to >= tia.line_end - kLineClocks &&
          tia.window_end == kLineClocks * (game.info.first_line + game.info.height);
  valid = valid && machine.cpu.cycles >= 0 && machine.cpu.cycles <= 200'000'000;
  valid = valid && is_time(tia.hmove_at) && is_time(tia.dump_released_at) &&
          is_time(riot.set_at) && is_time(riot.read_at);
  valid = valid && tia.frame_offset >= 0 && tia.frame_offset < kLineCycles;
  valid = valid && riot.timer >= 0 && riot.timer < 256 &&
          (riot.shift == 0 || riot.shift == 3 || riot.shift == 6 || riot.shift == 10);
  for (int i = 0; i < 2; ++i) {
    valid = valid && machine.actions[i] < kNumActions &&
            machine.controls.paddles[i] >= kPaddleMin &&
            machine.controls.paddles[i] <= kPaddleMax;
  }
  return valid;
}

BEAST_HD inline const uint8_t* picture(const Machine& machine, const Screens& screens) {
  return screens.pixels[machine.tia.buffer];
}

BEAST_HD inline bool is_over(const Machine& machine) { return machine.rules.terminal; }
BEAST_HD inline int lives(const Machine& machine) { return count_lives(machine.rules); }
BEAST_HD inline int frame_number(const Machine& machine) {
  return machine.frame_number;
}
BEAST_HD inline int episode_frame_number(const Machine& machine) {
  return machine.episode_frame_number;
}
BEAST_HD inline const uint8_t* ram(const Machine& machine) { return machine.riot.ram; }
BEAST_HD inline int height(const Game& game) { return game.info.height; }
BEAST_HD inline bool is_pal(const Game& game) { return game.pal; }

}  // namespace beast::atari
