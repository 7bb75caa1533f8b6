// SPDX-License-Identifier: Apache-2.0
// libatari's Python face: one console, frame by frame. vector_binding.cc, where there
// is one, adds the batches.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "atari/engine.h"
#include "atari/translation.h"
#include "atari/translator.h"

namespace py = pybind11;

namespace beast::atari {
namespace {

using Actions = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

// The game's program as a C++ file.
std::string translate(const py::bytes& rom, const std::string& name) {
  const std::string_view bytes = rom;
  const auto game =
      load_game({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, name);
  const py::gil_scoped_release release;
  return Translator(*game, play_and_note(*game, 2000)).write();
}

// The headers that this module was built from and that such a file includes.
std::vector<std::pair<std::string, std::string>> headers() {
  return {
#include "headers_as_text.inc"
  };
}

// One environment without preprocessing. Not for more than one thread at a time.
class Console {
 public:
  Console(const py::bytes& rom, const std::string& name, uint32_t seed,
          double sticky_probability, bool two_phase, bool any_rom)
      : game_(load(rom, name, any_rom)),
        state_(std::make_unique<State>()),
        log_(two_phase ? std::make_unique<TiaLog>() : nullptr) {
    power_on(*game_, state_->machine, state_->screens, seed, sticky_probability);
  }

  void reset() { reset_game(*game_, state_->machine, state_->screens); }

  int act(int action, bool draw) {
    check_action(action);
    return run_frame(action, draw);
  }

  // act() for every one of actions, a reset wherever the game is over; the sum of what
  // they returned. For measuring, and to get far quickly.
  int run(const Actions& actions, const Actions& draws) {
    if (actions.size() != draws.size()) {
      throw std::invalid_argument("run: expected as many draws as actions");
    }
    int sum = 0;
    const uint8_t* action = actions.data();
    const uint8_t* draw = draws.data();
    const py::ssize_t count = actions.size();
    for (py::ssize_t i = 0; i < count; ++i) check_action(action[i]);
    const py::gil_scoped_release release;
    for (py::ssize_t i = 0; i < count; ++i) {
      sum += run_frame(action[i], draw[i] != 0);
      if (is_over(state_->machine)) reset();
    }
    return sum;
  }

  py::array_t<uint8_t> screen() const {
    return py::array_t<uint8_t>({height(*game_), kWidth},
                                picture(state_->machine, state_->screens));
  }
  py::array_t<uint8_t> ram() const {
    return py::array_t<uint8_t>(128, atari::ram(state_->machine));
  }
  bool game_over() const { return is_over(state_->machine); }
  int lives() const { return atari::lives(state_->machine); }
  int frame_number() const { return atari::frame_number(state_->machine); }
  int episode_frame_number() const {
    return atari::episode_frame_number(state_->machine);
  }
  std::vector<int> minimal_actions() const { return atari::minimal_actions(*game_); }

  void use_translation(const std::string& path) {
    game_ = load_translation(*game_, path);
  }

  py::bytes get_state() const {
    return {reinterpret_cast<const char*>(state_.get()), sizeof(State)};
  }
  void set_state(const py::bytes& bytes) {
    const std::string_view given = bytes;
    if (given.size() != sizeof(State)) {
      throw std::invalid_argument("set_state: got " + std::to_string(given.size()) +
                                  " bytes, expected " + std::to_string(sizeof(State)) +
                                  " as from get_state of this version");
    }
    auto state = std::make_unique<State>();
    std::memcpy(static_cast<void*>(state.get()), given.data(), sizeof(State));
    if (!is_valid(*game_, state->machine)) {
      throw std::invalid_argument("set_state: these bytes are no state of this game");
    }
    state_ = std::move(state);
  }

 private:
  struct State {
    Machine machine;
    Screens screens;
  };

  static std::unique_ptr<const Game> load(const py::bytes& rom, const std::string& name,
                                          bool any_rom) {
    const std::string_view bytes = rom;
    return load_game({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                     name, any_rom);
  }
  int run_frame(int action, bool draw) {
    TiaLog* log = draw ? log_.get() : nullptr;
    const int reward =
        atari::act(*game_, state_->machine, state_->screens, action, draw, log);
    if (log) draw_log(*log);
    return reward;
  }
  static void check_action(int action) {
    if (action < 0 || action >= kNumActions) {
      throw std::invalid_argument("act: got action " + std::to_string(action) +
                                  ", expected 0 to 17");
    }
  }

  std::unique_ptr<const Game> game_;
  std::unique_ptr<State> state_;
  std::unique_ptr<TiaLog> log_;  // Of frames that are drawn; null: in one phase.
};

}  // namespace

// Defined by vector_binding.cc, which is built in where it exists.
#if defined(BEAST_ATARI_VECTOR)
void bind_vector(py::module_& module);
#endif

}  // namespace beast::atari

PYBIND11_MODULE(libatari, module) {
  using beast::atari::Console;
  module.doc() = "Atari 2600 games as in ale-py, frame by frame the same.";
  module.def("supported_games", &beast::atari::supported_games);
  module.def("headers", &beast::atari::headers);
  module.def("translate", &beast::atari::translate, py::arg("rom"), py::arg("name"));
  py::class_<Console>(module, "Console")
      .def(py::init<const py::bytes&, const std::string&, uint32_t, double, bool,
                    bool>(),
           py::arg("rom"), py::arg("name"), py::arg("seed") = 0,
           py::arg("sticky_probability") = 0.0, py::kw_only(),
           py::arg("two_phase") = false, py::arg("any_rom") = false)
      .def("reset", &Console::reset)
      .def("act", &Console::act, py::arg("action"), py::arg("draw") = true)
      .def("run", &Console::run, py::arg("actions"), py::arg("draws"))
      .def("screen", &Console::screen)
      .def("ram", &Console::ram)
      .def("game_over", &Console::game_over)
      .def("lives", &Console::lives)
      .def("frame_number", &Console::frame_number)
      .def("episode_frame_number", &Console::episode_frame_number)
      .def("minimal_actions", &Console::minimal_actions)
      .def("use_translation", &Console::use_translation, py::arg("path"))
      .def("get_state", &Console::get_state)
      .def("set_state", &Console::set_state, py::arg("state"));
#if defined(BEAST_ATARI_VECTOR)
  beast::atari::bind_vector(module);
#endif
}
