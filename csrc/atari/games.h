// SPDX-License-Identifier: Apache-2.0
// The games: a table of what each one needs from the console, and the rules that read
// reward, lives and the end of the game from RAM after every frame.
//
// A game of your own: a name in GameId, a row in kGames and a case in step_rules.
#pragma once

#include <cstdint>

#include "atari/machine.h"
#include "atari/platform.h"

namespace beast::atari {

// ale-py's numbers.
enum Action : uint8_t {
  kNoop,
  kFire,
  kUp,
  kRight,
  kLeft,
  kDown,
  kUpRight,
  kUpLeft,
  kDownRight,
  kDownLeft,
  kUpFire,
  kRightFire,
  kLeftFire,
  kDownFire,
  kUpRightFire,
  kUpLeftFire,
  kDownRightFire,
  kDownLeftFire,
  kNumActions
};

// How the cartridge shows its ROM in 4K of addresses, see cartridge.h.
enum class Mapper : uint8_t { k2K, k4K, kF8, kF6, kE0, kFE, kF8SC, kF6SC };

// clang-format off
enum class GameId : uint8_t {
  alien, amidar, assault, asterix,
  asteroids, atlantis, bank_heist, battle_zone,
  beam_rider, berzerk, bowling, boxing,
  breakout, centipede, chopper_command, crazy_climber,
  defender, demon_attack, double_dunk, enduro,
  fishing_derby, freeway, frostbite, gopher,
  gravitar, hero, ice_hockey, jamesbond,
  kangaroo, krull, kung_fu_master, montezuma_revenge,
  ms_pacman, name_this_game, phoenix, pitfall,
  pong, private_eye, qbert, riverraid,
  road_runner, robotank, seaquest, skiing,
  solaris, space_invaders, star_gunner, surround,
  tennis, time_pilot, tutankham, up_n_down,
  venture, video_pinball, wizard_of_wor, yars_revenge,
  zaxxon, air_raid, carnival, elevator_action,
  journey_escape, kaboom, pooyan
};
// clang-format on

enum GameFlags : uint8_t {
  kJoysticks = 0,
  kPaddles = 1,
  kSwappedPaddles = 2,  // Player A has the second paddle of the left port.
  kSwappedPorts = 4,    // Player A has the right joystick.
  kNoHmoveBlanks = 8,   // The console does not show the black stripes of HMOVE.
  kDifficultyA = 16,    // Both difficulty switches, until the first action.
  // Some frames end before the picture does, and show what was drawn there two frames
  // before: so every frame has to be drawn.
  kShortFrames = 32,
};

// SELECT is held for select_frames, again and again, until the byte at address is
// value; then the game is reset. select_frames of 0: the game has no modes. Some games
// need more than that, see console.h.
struct ModeRule {
  uint8_t address, value, select_frames;
};

struct GameInfo {
  GameId id;
  const char* name;
  const char* md5;
  Mapper mapper;
  uint32_t actions;  // The minimal ones, bit by bit.
  int16_t first_line, height;
  uint8_t flags;
  uint8_t start_action, num_start_actions;
  ModeRule mode;
};

// clang-format off
inline constexpr GameInfo kGames[] = {
    {GameId::alien, "alien", "f1a0a23e6464d954e3a9579c4ccd01c8", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x81, 0x0, 1}},
    {GameId::amidar, "amidar", "acb7750b4d0c4bd34969802a7deb2990", Mapper::k4K, 0x03C3F, 34, 210, kDifficultyA, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::assault, "assault", "de78b3a064d374390ac0710f95edde92", Mapper::k4K, 0x0181F, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::asterix, "asterix", "89a68746eff7f266bbf08de2483abe55", Mapper::kF8, 0x003FD, 34, 210, kJoysticks, kFire, 1, {0x0, 0x0, 0}},
    {GameId::asteroids, "asteroids", "ccbd36746ed4525821a8083b0d6d2c2c", Mapper::kF8, 0x0FCFF, 34, 210, kNoHmoveBlanks, kNoop, 0, {0x80, 0x0, 2}},
    {GameId::atlantis, "atlantis", "9ad36e699ef6f45d9eb6c4cf90475c9f", Mapper::k4K, 0x01803, 34, 210, kJoysticks, kNoop, 0, {0x8D, 0x0, 2}},
    {GameId::bank_heist, "bank_heist", "00ce0bdd43aed84a983bef38fe7f5ee3", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 1}},
    {GameId::battle_zone, "battle_zone", "41f252a66c6301f1e8ab3612c19bc5d4", Mapper::kF8, 0x3FFFF, 34, 210, kNoHmoveBlanks, kNoop, 0, {0xA1, 0x1, 2}},
    {GameId::beam_rider, "beam_rider", "79ab4123a83dc11d468fb2108ea09e2e", Mapper::kF8, 0x018DF, 34, 210, kJoysticks, kRight, 1, {0x0, 0x0, 0}},
    {GameId::berzerk, "berzerk", "136f75c4dd02c29283752b7e5799f978", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x1, 2}},
    {GameId::bowling, "bowling", "c9b7afad3bfd922e006a6bfc1d4f3fe7", Mapper::k2K, 0x02427, 34, 210, kJoysticks, kNoop, 0, {0x82, 0x0, 2}},
    {GameId::boxing, "boxing", "c3ef5c4653212088eda54dc91d787870", Mapper::k2K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::breakout, "breakout", "f34f08e5eb96e500e851a80be3277a56", Mapper::k2K, 0x0001B, 34, 210, kPaddles, kNoop, 0, {0xB2, 0x0, 1}},
    {GameId::centipede, "centipede", "91c2098e88a6b13f977af8c003e0bca5", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0xA7, 0x16, 2}},
    {GameId::chopper_command, "chopper_command", "c1cb228470a87beb5f36e90ac745da26", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0xE0, 0x0, 2}},
    {GameId::crazy_climber, "crazy_climber", "55ef7b65066428367844342ed59f956c", Mapper::kF8, 0x003FD, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 2}},
    {GameId::defender, "defender", "0f643c34e40e3f1daafd9c524d3ffe64", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x9B, 0x1, 2}},
    {GameId::demon_attack, "demon_attack", "f0e0addc07971561ab80d9abe1b8d333", Mapper::k4K, 0x0181B, 34, 210, kJoysticks, kNoop, 0, {0xEA, 0x1, 1}},
    {GameId::double_dunk, "double_dunk", "368d88a6c071caba60b4f778615aae94", Mapper::kF6, 0x3FFFF, 34, 210, kJoysticks, kUpFire, 1, {0xB0, 0x0, 1}},
    {GameId::enduro, "enduro", "94b92a882f6dbaa6993a46e2dcc58402", Mapper::k4K, 0x01B3B, 34, 210, kJoysticks, kFire, 1, {0x0, 0x0, 0}},
    {GameId::fishing_derby, "fishing_derby", "b8865f05676e64f3bec72b9defdacfa7", Mapper::k2K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::freeway, "freeway", "8e0ab801b1705a740b476b7f588c6d16", Mapper::k2K, 0x00025, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 1}},
    {GameId::frostbite, "frostbite", "4ca73eb959299471788f0b685c3ba0b5", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 1}},
    {GameId::gopher, "gopher", "c16c79aad6272baffb8aae9a7fff0864", Mapper::k4K, 0x01C1F, 34, 210, kJoysticks, kFire, 1, {0xD3, 0x0, 5}},
    {GameId::gravitar, "gravitar", "8ac18076d01a6b63acf6e2cab4968940", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kFire, 16, {0x80, 0x0, 10}},
    {GameId::hero, "hero", "fca4a5be1251927027f2c24774a02160", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 1}},
    {GameId::ice_hockey, "ice_hockey", "a4c08c4994eb9d24fb78be1793e82e26", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 2}},
    {GameId::jamesbond, "jamesbond", "e51030251e440cffaab1ac63438b44ae", Mapper::kE0, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x8C, 0x0, 20}},
    {GameId::kangaroo, "kangaroo", "4326edb70ff20d0ee5ba58fa5cb09d60", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0xBA, 0x0, 2}},
    {GameId::krull, "krull", "4baada22435320d185c95b7dd2bcdb24", Mapper::kF8, 0x3FFFF, 34, 210, kShortFrames, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::kung_fu_master, "kung_fu_master", "5b92a93b23523ff16e2789b820e2a4c5", Mapper::kF8, 0x3FB3D, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::montezuma_revenge, "montezuma_revenge", "3347a6dd59049b15a38394aa2dafa585", Mapper::kE0, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::ms_pacman, "ms_pacman", "87e79cd41ce136fd4f72cc6e2c161bee", Mapper::kF8, 0x003FD, 34, 210, kNoHmoveBlanks, kNoop, 0, {0x99, 0x1, 10}},
    {GameId::name_this_game, "name_this_game", "36306070f0c90a72461551a7a4f3a209", Mapper::k4K, 0x0181B, 34, 210, kJoysticks, kNoop, 0, {0xDE, 0x8, 2}},
    {GameId::phoenix, "phoenix", "7e52a95074a66640fcfde124fffd491a", Mapper::kF8, 0x0383B, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::pitfall, "pitfall", "3e90cf23106f2e08b2781e41299de556", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kUp, 1, {0x0, 0x0, 0}},
    {GameId::pong, "pong", "60e0ea3cbe0913d39803477945e9e5ec", Mapper::k2K, 0x0181B, 34, 210, kPaddles | kSwappedPaddles, kNoop, 0, {0x96, 0x0, 2}},
    {GameId::private_eye, "private_eye", "ef3a4f64b6494ba770862768caf04b86", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kUp, 1, {0x80, 0x0, 2}},
    {GameId::qbert, "qbert", "484b0076816a104875e00467d431c2d2", Mapper::k4K, 0x0003F, 40, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::riverraid, "riverraid", "393948436d1f4cc3192410bb918f9724", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::road_runner, "road_runner", "ce5cc62608be2cd3ed8abd844efb8919", Mapper::kF6, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::robotank, "robotank", "4f618c2429138e0280969193ed6c107e", Mapper::kFE, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::seaquest, "seaquest", "240bfbac5163af4df5ae713985386f92", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::skiing, "skiing", "b76fbadc8ffb1f83e2ca08b6fb4d6c9f", Mapper::k2K, 0x00019, 34, 210, kJoysticks, kDown, 16, {0x0, 0x0, 0}},
    {GameId::solaris, "solaris", "e72eb8d4410152bdcb69e7fba327b420", Mapper::kF6, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::space_invaders, "space_invaders", "72ffbef6504b75e69ee1045af9075f66", Mapper::k4K, 0x0181B, 34, 210, kJoysticks, kNoop, 0, {0xDC, 0x0, 2}},
    {GameId::star_gunner, "star_gunner", "a3c1c70024d7aabb41381adbfb6d3b25", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0xF4, 0x0, 15}},
    {GameId::surround, "surround", "4d7517ae69f95cfbc053be01312b7dba", Mapper::k2K, 0x0003D, 34, 210, kSwappedPorts, kNoop, 0, {0xF9, 0x1, 2}},
    {GameId::tennis, "tennis", "42cdd6a9e42a3639e190722b8ea3fc51", Mapper::k2K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x80, 0x0, 2}},
    {GameId::time_pilot, "time_pilot", "fc2104dd2dadf9a6176c1c1c8f87ced9", Mapper::kF8, 0x03C3F, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::tutankham, "tutankham", "085322bae40d904f53bdcc56df0593fc", Mapper::kE0, 0x01C3D, 34, 210, kJoysticks, kNoop, 0, {0xAB, 0x0, 2}},
    {GameId::up_n_down, "up_n_down", "a499d720e7ee35c62424de882a3351b6", Mapper::kF8, 0x02427, 30, 210, kJoysticks, kFire, 1, {0x0, 0x0, 0}},
    {GameId::venture, "venture", "3e899eba0ca8cd2972da1ae5479b4f0d", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::video_pinball, "video_pinball", "107cc025334211e6d29da0b6be46aec7", Mapper::k4K, 0x01C3F, 34, 210, kJoysticks, kNoop, 0, {0xC1, 0x0, 2}},
    {GameId::wizard_of_wor, "wizard_of_wor", "7e8aa18bc9502eb57daaf5e7c1e94da7", Mapper::k4K, 0x03C3F, 34, 210, kSwappedPorts, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::yars_revenge, "yars_revenge", "c5930d0e8cdae3e037349bfa08e871be", Mapper::k4K, 0x3FFFF, 34, 210, kJoysticks, kFire, 1, {0xE3, 0x0, 1}},
    {GameId::zaxxon, "zaxxon", "eea0da9b987d661264cce69a7c13c3bd", Mapper::kF8, 0x3FFFF, 34, 210, kJoysticks, kNoop, 0, {0x82, 0x0, 10}},
    {GameId::air_raid, "air_raid", "35be55426c1fec32dfb503b4f0651572", Mapper::k4K, 0x0181B, 34, 250, kJoysticks, kFire, 1, {0xAA, 0x1, 10}},
    {GameId::carnival, "carnival", "028024fb8e5e5f18ea586652f9799c96", Mapper::k4K, 0x0181B, 26, 214, kJoysticks, kNoop, 0, {0x0, 0x0, 0}},
    {GameId::elevator_action, "elevator_action", "71f8bacfbdca019113f3f0801849057e", Mapper::kF8SC, 0x3FFFF, 34, 210, kJoysticks, kFire, 16, {0x0, 0x0, 0}},
    {GameId::journey_escape, "journey_escape", "718ae62c70af4e5fd8e932fee216948a", Mapper::k4K, 0x3FBFD, 34, 230, kJoysticks, kFire, 1, {0x0, 0x0, 0}},
    {GameId::kaboom, "kaboom", "5428cdfada281c569c74c7308c7f2c26", Mapper::k2K, 0x0001B, 34, 210, kPaddles, kFire, 1, {0x0, 0x0, 0}},
    {GameId::pooyan, "pooyan", "4799a40b6e889370b7ee55c17ba65141", Mapper::k4K, 0x02427, 26, 220, kJoysticks, kNoop, 0, {0xBD, 0x0A, 2}},
};
// clang-format on

namespace rules {

// The byte at an address of RAM, 0x80 to 0xFF.
struct Ram {
  const uint8_t* bytes;
  BEAST_HD int operator()(int address) const { return bytes[address & 0x7F]; }

  // Two decimal digits.
  BEAST_HD int bcd(int address) const {
    const int byte = (*this)(address);
    return (byte >> 4) * 10 + (byte & 15);
  }
  BEAST_HD int bcd(int low, int high) const { return bcd(low) + 100 * bcd(high); }
  BEAST_HD int bcd(int low, int middle, int high) const {
    return bcd(low, middle) + 10000 * bcd(high);
  }

  // One digit per byte, as the address of a graphic of 8 bytes.
  BEAST_HD int graphic(int address) const { return (*this)(address) >> 3; }
  // One digit in the low half of a byte; a blank is 10.
  BEAST_HD int nibble(int address) const {
    const int digit = (*this)(address)&15;
    return digit == 10 ? 0 : digit;
  }
};

BEAST_HD inline int count_bits(int three) {
  return (three & 1) + (three >> 1 & 1) + (three >> 2 & 1);
}

}  // namespace rules

BEAST_HD inline void reset_rules(const GameInfo& info, RulesState& state) {
  state = {};
  switch (info.id) {
    case GameId::pitfall:
      state.score = 2000;
      break;
    case GameId::private_eye:
      state.score = 1000;
      break;
    case GameId::qbert:
      state.previous = 2;
      break;
    default:
      break;
  }
  switch (info.id) {
    case GameId::alien:
    case GameId::amidar:
    case GameId::asterix:
    case GameId::beam_rider:
    case GameId::berzerk:
    case GameId::centipede:
    case GameId::chopper_command:
    case GameId::defender:
    case GameId::gopher:
    case GameId::kangaroo:
    case GameId::krull:
    case GameId::ms_pacman:
    case GameId::name_this_game:
    case GameId::pitfall:
    case GameId::road_runner:
    case GameId::solaris:
    case GameId::space_invaders:
    case GameId::tutankham:
    case GameId::video_pinball:
    case GameId::wizard_of_wor:
    case GameId::pooyan:
      state.lives = 3;
      break;
    case GameId::assault:
    case GameId::asteroids:
    case GameId::demon_attack:
    case GameId::frostbite:
    case GameId::hero:
    case GameId::kung_fu_master:
    case GameId::qbert:
    case GameId::riverraid:
    case GameId::robotank:
    case GameId::seaquest:
    case GameId::venture:
    case GameId::yars_revenge:
    case GameId::elevator_action:
      state.lives = 4;
      break;
    case GameId::bank_heist:
    case GameId::battle_zone:
    case GameId::breakout:
    case GameId::crazy_climber:
    case GameId::phoenix:
    case GameId::star_gunner:
    case GameId::time_pilot:
    case GameId::up_n_down:
    case GameId::zaxxon:
      state.lives = 5;
      break;
    case GameId::atlantis:
    case GameId::gravitar:
    case GameId::jamesbond:
    case GameId::montezuma_revenge:
      state.lives = 6;
      break;
    case GameId::surround:
    case GameId::air_raid:
    case GameId::kaboom:
      state.lives = 1;
      break;
    default:
      break;
  }
}

// Reads the frame that just ran: reward, lives and whether the game is over.
BEAST_HD inline void step_rules(const GameInfo& info, const uint8_t* bytes,
                                RulesState& state) {
  const rules::Ram ram{bytes};
  const int old_score = state.score;
  int score = old_score, lives = state.lives;
  bool terminal = false;
  switch (info.id) {
    case GameId::alien:
      score = 0;
      for (int address = 0x83; address <= 0x8B; address += 2) {
        score = 10 * score + (ram(address) == 0x80 ? 0 : ram.graphic(address));
      }
      score *= 10;
      lives = ram(0xC0) & 15;
      terminal = lives == 0;
      break;
    case GameId::amidar:
      score = ram.bcd(0xD9, 0xDA, 0xDB);
      lives = ram(0xD6) & 15;
      terminal = ram(0xD6) == 0x80;
      break;
    case GameId::assault:
      score = ram.bcd(0x82, 0x81, 0x80);
      lives = ram(0xE5);
      terminal = lives == 0;
      break;
    case GameId::asterix:
      score = ram.bcd(0xE0, 0xDF, 0xDE);
      lives = ram(0xD3) & 15;
      terminal = ram(0xC7) == 1 && lives == 1;
      break;
    case GameId::asteroids:
      score = 10 * ram.bcd(0xBE, 0xBD);
      lives = ram(0xBC) >> 4;
      terminal = lives == 0;
      break;
    case GameId::atlantis:
      score = 100 * ram.bcd(0xA2, 0xA3, 0xA1);
      lives = ram(0xF1);
      terminal = lives == 0xFF;
      break;
    case GameId::bank_heist:
      score = ram.bcd(0xDA, 0xD9, 0xD8);
      lives = ram(0xD5);
      terminal = ram(0xCE) == 1 && lives == 0;
      break;
    case GameId::battle_zone: {
      const auto digit = [](int nibble) { return nibble == 10 ? 0 : nibble; };
      score = 1000 * (digit(ram(0x9D) >> 4) + 10 * digit(ram(0x9E) & 15) +
                      100 * digit(ram(0x9E) >> 4));
      lives = ram(0xBA) & 15;
      terminal = lives == 0;
      break;
    }
    case GameId::beam_rider: {
      score = ram.bcd(0x89, 0x8A, 0x8B);
      const int now = ram(0x85) + 1;
      if (now != lives - 1 || ram(0x8C) == 1) lives = now;
      terminal = ram(0x85) == 0xFF;
      break;
    }
    case GameId::berzerk:
      score = ram.bcd(0xDF, 0xDE, 0xDD);
      lives = ram(0xDA) + 1;
      terminal = ram(0xDA) == 0xFF;
      break;
    case GameId::bowling:
      score = ram.bcd(0xA1, 0xA6);
      terminal = ram(0xA4) > 0x10;
      break;
    case GameId::boxing: {
      const int mine = ram(0x92) == 0xC0 ? 100 : ram.bcd(0x92);
      const int theirs = ram(0x93) == 0xC0 ? 100 : ram.bcd(0x93);
      score = mine - theirs;
      const bool no_time = ram(0x90) >> 4 == 0 && ram(0x91) == 0;
      terminal = mine == 100 || theirs == 100 || no_time;
      break;
    }
    case GameId::breakout:
      score = ram.bcd(0xCD) + 100 * (ram(0xCC) & 15);
      lives = ram(0xB9);
      state.started |= lives == 5;
      terminal = state.started && lives == 0;
      break;
    case GameId::centipede:
      score = ram.bcd(0xF6, 0xF5, 0xF4);
      lives = (ram(0xED) >> 4 & 7) + 1;
      terminal = (ram(0xA6) & 0x40) != 0;
      break;
    case GameId::chopper_command:
      score = 100 * ram.bcd(0xEE, 0xEC);
      lives = ram(0xE4) & 15;
      state.started |= ram(0xC2) & 1;
      terminal = lives == 0 && state.started;
      break;
    case GameId::crazy_climber:
      score = 100 * (ram(0x82) + 10 * ram(0x83) + 100 * ram(0x84) + 1000 * ram(0x85));
      lives = ram(0xAA);
      terminal = lives == 0;
      break;
    case GameId::defender:
      score = 0;
      for (int i = 5; i >= 0; --i) score = 10 * score + ram.nibble(0x9C + i);
      lives = ram(0xC2);
      terminal = lives == 0;
      break;
    case GameId::demon_attack:
      score = ram.bcd(0x85, 0x83, 0x81);
      // Shown before the first game.
      if (ram(0x81) == 0xAB && ram(0x83) == 0xCD && ram(0x85) == 0xEA) score = 0;
      lives = ram(0xF2) + 1;
      terminal = ram(0xF2) == 0 && ram(0xF1) == 0xBD;
      break;
    case GameId::double_dunk: {
      const int mine = ram.bcd(0xF6), theirs = ram.bcd(0xF7);
      score = mine - theirs;
      terminal = (mine >= 24 || theirs >= 24) && ram(0xFE) == 0xE7;
      break;
    }
    case GameId::enduro: {
      const int level = ram(0xAD), cars = ram.bcd(0xAB, 0xAC);
      score = level == 0   ? 0
              : level == 1 ? 200 - cars
                           : 200 + 300 * (level - 2) + 300 - cars;
      terminal = ram(0xAF) == 0xFF;
      break;
    }
    case GameId::fishing_derby: {
      const int mine = ram.bcd(0xBD), theirs = ram.bcd(0xBE);
      score = mine - theirs;
      terminal = mine == 99 || theirs == 99;
      break;
    }
    case GameId::freeway:
      score = ram.bcd(0xE7);
      terminal = ram(0x96) == 1;
      break;
    case GameId::frostbite:
      score = ram.bcd(0xCA, 0xC9, 0xC8);
      lives = (ram(0xCC) & 15) + 1;
      terminal = (ram(0xCC) & 15) == 0 && (ram(0xF1) & 0x80);
      break;
    case GameId::gopher:
      score = ram.bcd(0xB2, 0xB1, 0xB0);
      lives = rules::count_bits(ram(0xB4) & 7);
      terminal = lives == 0;
      break;
    case GameId::gravitar:
      score = ram.bcd(0x89, 0x88, 0x87);
      lives = ram(0x81) == 0 ? 6 : ram(0x84) + 1;
      terminal = ram(0x81) == 1;
      break;
    case GameId::hero:
      score = ram.bcd(0xB9, 0xB8, 0xB7);
      lives = ram(0xB3);
      terminal = lives == 0;
      break;
    case GameId::ice_hockey:
      score = ram.bcd(0x8A) - ram.bcd(0x8B);
      terminal = ram(0x87) == 0 && ram(0x86) == 0;
      break;
    case GameId::jamesbond:
      score = ram.bcd(0xDC, 0xDD, 0xDE);
      lives = (ram(0x86) & 15) + 1;
      terminal = (ram(0x86) & 15) == 0 && ram(0x8C) == 0x68;
      break;
    case GameId::kangaroo:
      score = 100 * ram.bcd(0xA8, 0xA7);
      lives = (ram(0xAD) & 7) + 1;
      terminal = ram(0xAD) == 0xFF;
      break;
    case GameId::krull:
      score = ram.bcd(0x9E, 0x9D, 0x9C);
      lives = (ram(0x9F) & 7) + 1;
      terminal = ram(0x9F) == 0 && ram(0xA2) == 3 && ram(0x80) == 0x80;
      break;
    case GameId::kung_fu_master:
      score = ram.bcd(0x9A, 0x99, 0x98);
      lives = (ram(0x9D) & 7) + 1;
      terminal = ram(0x9D) == 0xFF;
      break;
    case GameId::montezuma_revenge:
      score = ram.bcd(0x95, 0x94, 0x93);
      lives = (ram(0xBA) & 7) + 1;
      terminal = ram(0xBA) == 0 && ram(0xFE) == 0x60;
      break;
    case GameId::ms_pacman:
      score = ram.bcd(0xF8, 0xF9, 0xFA);
      lives = (ram(0xFB) & 7) + 1;
      terminal = (ram(0xFB) & 15) == 0 && ram(0xA7) == 0x53;
      break;
    case GameId::name_this_game:
      score = ram.bcd(0xC6, 0xC5, 0xC4);
      lives = ram(0xC7) & 7;
      terminal = lives == 0;
      break;
    case GameId::phoenix:
      score = 10 * (10 * ram.bcd(0xC8, 0xC9) + (ram(0xC7) >> 4));
      lives = ram(0xCB) & 7;
      terminal = ram(0xCC) == 0x80;
      break;
    case GameId::pitfall: {
      score = ram.bcd(0xD7, 0xD6, 0xD5);
      const int mark = ram(0x80) >> 4;
      lives = mark == 0xA ? 3 : mark == 8 ? 2 : 1;
      terminal = mark == 0 && ram(0x9E) != 0;
      break;
    }
    case GameId::pong:
      score = ram(0x8E) - ram(0x8D);
      terminal = ram(0x8E) == 21 || ram(0x8D) == 21;
      break;
    case GameId::private_eye:
      score = ram.bcd(0xCA, 0xC9, 0xC8);
      terminal = ram(0xC2) > 1;
      break;
    case GameId::qbert: {
      const int now = static_cast<int8_t>(ram(0x88));
      terminal = now == -2 || (now == 2 && state.previous == -1);
      if (now == state.previous - 1) --lives;
      state.previous = now;
      if (!terminal) score = ram.bcd(0xDB, 0xDA, 0xD9);
      break;
    }
    case GameId::riverraid: {
      score = 0;
      for (int address = 0xCD; address <= 0xD7; address += 2) {
        const bool is_digit = ram(address) % 8 == 0 && ram(address) <= 72;
        score = 10 * score + (is_digit ? ram.graphic(address) : 0);
      }
      const int now = ram(0xC0);
      lives = now == 0x58 ? 4 : now == 0x59 ? 1 : now / 8 + 1;
      terminal = now == 0x58 && state.previous == 0x59;
      state.previous = now;
      break;
    }
    case GameId::road_runner:
      score = 0;
      for (int i = 3; i >= 0; --i) score = 10 * score + ram.nibble(0xC9 + i);
      score *= 100;
      lives = (ram(0xC4) & 7) + 1;
      terminal = (ram(0xC4) & 7) == 0 && (ram(0xB9) != 0 || ram(0xBD) != 0);
      break;
    case GameId::robotank:
      score = ram(0xB6) * 12 + ram(0xB5);
      lives = (ram(0xA8) & 15) + 1;
      terminal = ram(0xA8) == 0 && ram(0xB4) == 0xFF;
      break;
    case GameId::seaquest:
      score = ram.bcd(0xBA, 0xB9, 0xB8);
      lives = ram(0xBB) + 1;
      terminal = ram(0xA3) != 0;
      break;
    case GameId::skiing:
      score = -(ram(0xE8) * 6000 + ram.bcd(0xEA, 0xE9));  // Time costs.
      terminal = ram(0x91) == 0xFF;
      break;
    case GameId::solaris:
      score = 10 * ram.bcd(0xDC, 0xDD, 0xDE);
      lives = ram(0xD9) & 15;
      terminal = ram(0xD9) == 0;
      break;
    case GameId::space_invaders:
      score = ram.bcd(0xE8, 0xE6);
      lives = ram(0xC9);
      terminal = (ram(0x98) & 0x80) || lives == 0;
      break;
    case GameId::star_gunner:
      score = 0;
      for (int i = 3; i >= 0; --i) score = 10 * score + ram.nibble(0x83 + i);
      score *= 100;
      state.started |= (ram(0x87) & 15) == 5;
      lives = state.started ? ram(0x87) & 15 : 5;
      terminal = ram(0x87) == 0;
      break;
    case GameId::surround: {
      const int mine = ram.bcd(0xF7), theirs = ram.bcd(0xF6);
      score = mine - theirs;
      terminal = mine == 10 || theirs == 10;
      break;
    }
    case GameId::tennis: {
      const int mine = ram(0xC7), theirs = ram(0xC8);
      score = mine - theirs;
      terminal = mine == 7 || theirs == 7 || (mine >= 6 && mine - theirs >= 2) ||
                 (theirs >= 6 && theirs - mine >= 2);
      break;
    }
    case GameId::time_pilot:
      score = 100 * ram.bcd(0x8D, 0x8F);
      if ((ram(0x80) & 15) == 2) lives = (ram(0x8B) & 7) + 1;
      terminal = ram(0xA0) != 0;
      break;
    case GameId::tutankham:
      score = ram.bcd(0x9C, 0x9A);
      lives = ram(0x9E) & 3;
      terminal = ram(0x9E) == 0 && ram(0x81) != 0x84;
      break;
    case GameId::up_n_down:
      score = ram.bcd(0x82, 0x81, 0x80);
      lives = (ram(0x86) & 15) + 1;
      terminal = ram(0x94) > 0x40 && (ram(0x86) & 15) == 0;
      break;
    case GameId::venture:
      score = 100 * ram.bcd(0xC8, 0xC7);
      lives = (ram(0xC6) & 7) + 1;
      terminal = ram(0xC6) == 0 && ram(0xCD) == 0xFF && (ram(0xBF) & 0x80);
      break;
    case GameId::video_pinball:
      score = ram.bcd(0xB0, 0xB2, 0xB4);
      lives = 4 + (ram(0xA8) & 1) - (ram(0x99) & 7);
      terminal = ram(0xAF) & 1;
      break;
    case GameId::wizard_of_wor:
      score = ram.bcd(0x86, 0x88);
      if (score >= 8000) score -= 8000;
      score *= 100;
      if ((ram(0xD7) & 1) == 0) lives = ram(0x8D) & 15;
      terminal = (ram(0x8D) & 15) == 0 && ram(0xF4) == 0xF8;
      break;
    case GameId::yars_revenge:
      score = ram.bcd(0xE2, 0xE1, 0xE0);
      lives = ram(0x9E) >> 4;
      terminal = lives == 0;
      break;
    case GameId::zaxxon:
      score = 100 * ram.bcd(0xE9, 0xE8);
      lives = ram(0xEA) & 7;
      terminal = lives == 0;
      break;
    case GameId::air_raid:
      score = ram.bcd(0xAA, 0xA9, 0xA8);
      terminal = ram(0xA7) == 0xFF;
      break;
    case GameId::carnival:
      score = 10 * ram.bcd(0xAE, 0xAD);
      terminal = ram(0x83) == 0;
      break;
    case GameId::elevator_action:
      score = ram.bcd(0x89, 0x88, 0x87);
      lives = ram(0x83);
      terminal = lives == 0 && ram(0x81) != 0;
      break;
    case GameId::journey_escape:
      score = ram.bcd(0x92, 0x91, 0x90);
      terminal = ram(0x95) == 0 && ram(0x96) == 0;
      break;
    case GameId::kaboom:
      score = ram.bcd(0xA5, 0xA4, 0xA3);
      terminal = ram(0xA1) == 0 || score == 999999;
      break;
    case GameId::pooyan:
      score = ram.bcd(0x8A, 0x89, 0x88);
      lives = (ram(0x96) & 7) + 1;
      terminal = ram(0x96) == 0 && ram(0x98) == 5;
      break;
  }

  int reward = score - old_score;
  switch (info.id) {
    case GameId::asteroids:  // The counter is full and begins again.
      if (reward < 0) reward += 100000;
      break;
    case GameId::space_invaders:
      if (reward < 0) reward += 10000;
      break;
    case GameId::centipede:
    case GameId::crazy_climber:
      if (reward < 0) reward = 0;
      break;
    case GameId::atlantis:  // The end of the game overwrites the score.
      if (terminal) reward = 0;
      break;
    case GameId::freeway:
      reward = reward < 0 ? 0 : reward > 1 ? 1 : reward;
      break;
    case GameId::ice_hockey:
      if (reward > 1) reward = 1;
      break;
    case GameId::journey_escape:  // The money at the start.
      if (reward == 50000) reward = 0;
      break;
    case GameId::tennis: {  // Games count; points where no game was won.
      const int points = ram(0xC5) - ram(0xC6);
      if (reward == 0) reward = points - state.previous;
      state.previous = points;
      break;
    }
    default:
      break;
  }
  state.score = score;
  state.reward = reward;
  state.lives = lives;
  state.terminal = terminal;
}

// Alien and chopper_command say how many lives are left, all others say 0 at the end.
BEAST_HD inline int count_lives(const RulesState& state) {
  return state.terminal ? 0 : state.lives;
}

}  // namespace beast::atari
