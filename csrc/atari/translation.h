// SPDX-License-Identifier: Apache-2.0
// Games whose program was translated to C++ and compiled (translator.h writes it,
// tools/recompile.py compiles it): loads the shared object and runs it in turns with
// the interpreter. For the host.
//
// A machine is the same between frames whoever ran them, so a game may be translated or
// not from one frame to the next.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "atari/cpu.h"
#include "atari/engine.h"
#include "atari/translation_abi.h"

namespace beast::atari {

// Game::run of a translated game.
inline void run_translated(const Game& game, Machine& machine, uint8_t* pixels) {
  const auto& translation = *static_cast<const Translation*>(game.context);
  const auto is_done = [&machine](uint32_t count) {
    return machine.tia.stop || machine.cpu.jammed || count >= kMaxInstructions;
  };
  for (uint32_t count = 0; !is_done(count);) {
    count = translation.run(&machine, pixels, count);
    if (is_done(count)) return;
    count = interpret(game, machine, pixels, count);
  }
}

// The game with the program from this shared object, which stays loaded for good. The
// caller answers for the file: code in it runs. Throws std::invalid_argument.
inline std::unique_ptr<const Game> load_translation(const Game& game,
                                                    const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(path + ": " + why + "; delete it to build it anew");
  };
  // Its marks in the code are those of one program.
  if (game.run) throw std::invalid_argument(path + ": the game is translated already");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse(dlerror());
  auto* translation =
      static_cast<Translation*>(dlsym(library, "beast_atari_translation"));
  if (!translation) refuse("no translated game");
  if (translation->version != kTranslationVersion ||
      translation->machine_size != sizeof(Machine)) {
    refuse("made for another libatari");
  }
  if (translation->rom_size != static_cast<uint32_t>(game.rom_size) ||
      std::memcmp(translation->rom, game.rom, translation->rom_size) != 0) {
    refuse("made from another ROM");
  }
  auto translated = std::make_unique<Game>(game);
  for (uint32_t i = 0; i < translation->num_entries; ++i) {
    translated->code[Game::kMargin + translation->entries[i]] =
        make_instruction(kTranslated, 0);
  }
  translated->run = run_translated;
  translated->context = translation;
  return translated;
}

}  // namespace beast::atari
