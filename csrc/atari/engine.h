// SPDX-License-Identifier: Apache-2.0
// An Atari 2600 that does, frame by frame, what ale-py does. This is its face; the
// parts are console.h (boot, reset, frames), cpu.h, riot.h, tia.h, cartridge.h,
// games.h.
//
// A Game is read-only and shared by all threads and environments. An environment is a
// Machine and its Screens: plain data without pointers, so a memcpy of both is a saved
// state. Different machines may run in different threads at the same time.
//
// What is called per frame allocates nothing, throws nothing and compiles for CUDA
// devices too (BEAST_HD); load_game and the lists are for the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "atari/game.h"
#include "atari/machine.h"
#include "atari/platform.h"
#include "atari/tia.h"

namespace beast::atari {

// Throws std::invalid_argument, saying what is wrong, for a name that is not among
// supported_games() and for bytes that are not the ROM that ale-py ships as this game.
// any_rom is for programs of one's own in this game's place: their size must be right.
std::unique_ptr<const Game> load_game(std::span<const uint8_t> rom,
                                      std::string_view name, bool any_rom = false);

// The names as in ale_py, for example "pong" and "ms_pacman".
std::vector<std::string> supported_games();

// Action numbers as in ale_py, 0 (NOOP) to 17, in rising order.
std::vector<int> minimal_actions(const Game& game);

// What ale-py does from its construction to the end of loadROM, with this random_seed
// and repeat_action_probability; includes one reset of the game.
BEAST_HD inline void power_on(const Game& game, Machine& machine, Screens& screens,
                              uint32_t seed, double sticky_probability);

BEAST_HD inline void reset_game(const Game& game, Machine& machine, Screens& screens);

// Runs one frame with one of ale-py's 18 actions and returns the reward. After the game
// is over it runs nothing and returns 0. Where draw is false the picture may be wrong
// afterwards, all else is right.
//
// With a log the frame is run in two phases: draw is not looked at, the picture is left
// to draw_log(*log) of tia.h. Logs of one machine are drawn in the order of its frames
// and before the next frame but one.
BEAST_HD inline int act(const Game& game, Machine& machine, Screens& screens,
                        int action, bool draw, TiaLog* log = nullptr);

// The last frame, [height(game), kWidth] colour numbers as ale-py's getScreen gives.
BEAST_HD inline const uint8_t* picture(const Machine& machine, const Screens& screens);

BEAST_HD inline bool is_over(const Machine& machine);
BEAST_HD inline int lives(const Machine& machine);
BEAST_HD inline int frame_number(const Machine& machine);
BEAST_HD inline int episode_frame_number(const Machine& machine);
BEAST_HD inline const uint8_t* ram(const Machine& machine);  // [128]

// Whether a machine whose bytes came from outside may be run at all.
BEAST_HD inline bool is_valid(const Game& game, const Machine& machine);

BEAST_HD inline int height(const Game& game);
BEAST_HD inline bool is_pal(const Game& game);

}  // namespace beast::atari

#include "atari/console.h"
#include "atari/loader.h"
