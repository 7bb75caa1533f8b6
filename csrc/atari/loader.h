// SPDX-License-Identifier: Apache-2.0
// Games from the bytes of their ROMs; for the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "atari/decode.h"
#include "atari/game.h"
#include "atari/games.h"
#include "atari/md5.h"

namespace beast::atari {

inline int rom_size_of(Mapper mapper) {
  switch (mapper) {
    case Mapper::k2K:
      return 2048;
    case Mapper::k4K:
      return 4096;
    case Mapper::kF6:
    case Mapper::kF6SC:
      return 16384;
    default:
      return 8192;
  }
}

// A game from bytes that nobody checks but for their size: for load_game, and for tests
// that bring programs of their own.
inline std::unique_ptr<Game> make_game(const GameInfo& info,
                                       std::span<const uint8_t> rom) {
  const auto size = static_cast<size_t>(rom_size_of(info.mapper));
  if (rom.size() != size) {
    throw std::invalid_argument(std::string(info.name) + ": the ROM has " +
                                std::to_string(rom.size()) + " bytes, expected " +
                                std::to_string(size));
  }
  auto game = std::make_unique<Game>();
  game->info = info;
  game->pal = info.height == 250;
  game->rom_size = std::max(static_cast<int>(size), Game::kBank);
  for (int i = 0; i < game->rom_size; ++i) {
    game->rom[i] = rom[static_cast<size_t>(i) % size];
  }
  decode_rom(*game);
  return game;
}

inline std::unique_ptr<const Game> load_game(std::span<const uint8_t> rom,
                                             std::string_view name, bool any_rom) {
  for (const GameInfo& info : kGames) {
    if (name != info.name) continue;
    if (const std::string found = md5(rom); !any_rom && found != info.md5) {
      throw std::invalid_argument(
          std::string(name) + ": this ROM's MD5 is " + found + ", expected " +
          info.md5 + ", that of ale_py/roms/" + info.name +
          ".bin in ale-py 0.12.1; pass that file or use ale-py for this one");
    }
    return make_game(info, rom);
  }
  throw std::invalid_argument("no game named \"" + std::string(name) +
                              "\" in this engine; libatari.supported_games() lists "
                              "those there are, ale-py runs the others");
}

inline std::vector<std::string> supported_games() {
  std::vector<std::string> names;
  for (const GameInfo& info : kGames) names.emplace_back(info.name);
  return names;
}

inline std::vector<int> minimal_actions(const Game& game) {
  std::vector<int> actions;
  for (int action = 0; action < kNumActions; ++action) {
    if (game.info.actions >> action & 1) actions.push_back(action);
  }
  return actions;
}

}  // namespace beast::atari
