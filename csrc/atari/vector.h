// SPDX-License-Identifier: Apache-2.0
// Many games stepped together and preprocessed, as ale-py's AtariVectorEnv does it:
// with equal options, seeds and actions the same bytes come out. How that one behaves
// was found by running it; docs/atari.md lists the rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "atari/engine.h"
#include "atari/preprocess.h"
#include "atari/shared_loop.h"
#include "atari/translation.h"

namespace beast::atari {

struct VectorOptions {
  int num_threads = 1;
  int frame_skip = 4;
  int stack = 4;
  int height = 84, width = 84;
  bool grey = true;             // Else RGB, [height, width, 3].
  bool max_pool = true;         // Over the last two frames of a step.
  bool rgb_max = false;         // See Preprocessor::Maximum.
  bool pad_with_first = false;  // After a reset: the first frame instead of black.
  int noop_max = 30;
  bool fire_reset = true;
  bool episodic_life = false;   // A lost life ends the episode and resets the game.
  bool life_loss_info = false;  // A lost life is said to end it, but the game goes on.
  bool clip_rewards = true;     // To their sign.
  int max_frames = 108'000;     // Of an episode, after its no-ops.
  double sticky_probability = 0.0;
  bool full_action_set = false;
  bool same_step_reset = false;  // Else with the step after the end.
  ResizeSimd simd = best_resize_simd();
};

// The caller's arrays, an entry per environment.
struct VectorOutputs {
  uint8_t* observations;
  int32_t* rewards;
  bool* terminated;
  bool* truncated;
  int32_t *lives, *frame_numbers, *episode_frame_numbers;
  uint8_t* final_observations;  // With same_step_reset: written where an episode ended.
};

// The environments. Not thread-safe: one caller at a time, also for different ones.
class Vector {
 public:
  struct NamedGame {
    std::string name;
    std::shared_ptr<const Game> game;
  };

  // Environment i plays games[game_of[i]]. Throws std::invalid_argument.
  Vector(std::vector<NamedGame> games, std::vector<int> game_of, VectorOptions options)
      : options_(options),
        game_of_(std::move(game_of)),
        loop_(options.num_threads, static_cast<int>(game_of_.size())) {
    check_options();
    if (games.empty() || game_of_.empty()) {
      throw std::invalid_argument("num_envs: expected at least one environment");
    }
    int max_height = 0;
    for (NamedGame& game : games) {
      max_height = std::max(max_height, atari::height(*game.game));
      games_.push_back(prepare(std::move(game)));
    }
    for (const int g : game_of_) {
      if (g < 0 || g >= static_cast<int>(games_.size())) {
        throw std::invalid_argument("game_of: no game " + std::to_string(g));
      }
    }
    plane_size_ = static_cast<size_t>(options.height) * options.width * num_channels();
    held_size_ = static_cast<size_t>(max_height) * kWidth * num_channels();
    const size_t size = sizeof(Environment) + held_size_ + options.stack * plane_size_;
    stride_ = (size + 63) / 64 * 64;
    // Zeroed by the system, page by page when it is touched.
    memory_.reset(static_cast<std::byte*>(std::calloc(num_envs() + 1, stride_)));
    if (!memory_) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    first_ = memory_.get() + (64 - address % 64) % 64;
    for (int t = 0; t < loop_.num_threads(); ++t) {
      auto& scratch = scratch_.emplace_back();
      for (const auto& game : games_) {
        scratch.resize.push_back(game.channels[0].make_scratch());
      }
      scratch.picture.resize(kMaxHeight * kWidth);
      scratch.pooled.resize(kMaxHeight * kWidth);
      scratch.planes.resize(3 * plane_size_);
    }
  }
  ~Vector() { loop_.wait(); }

  int num_envs() const { return static_cast<int>(game_of_.size()); }
  int num_threads() const { return loop_.num_threads(); }
  size_t observation_size() const { return options_.stack * plane_size_; }
  size_t bytes_per_env() const { return stride_; }
  const VectorOptions& options() const { return options_; }
  // Numbers of ale-py's actions, in the order of the environment's own numbers.
  const std::vector<int>& actions_of(int i) const { return game(i).actions; }

  // Resets the environments of mask, or all; one with a seed is switched on anew. The
  // results are those of all environments. Throws std::invalid_argument.
  void reset(const std::vector<bool>& mask,
             const std::vector<std::optional<uint32_t>>& seeds,
             const VectorOutputs& outputs) {
    check_idle("reset");
    for (int i = 0; i < num_envs(); ++i) {
      if (!environment(i).is_on && !(mask[i] && seeds[i])) {
        throw std::invalid_argument("reset: environment " + std::to_string(i) +
                                    " was never seeded; reset all with seeds first");
      }
      if (mask[i] && seeds[i]) boot_if_cached(game_of_[i]);
    }
    loop_.run([&](int thread, int i) {
      if (mask[i]) reset_one(i, seeds[i], thread);
      write(i, outputs);
      outputs.rewards[i] = 0;
      outputs.terminated[i] = outputs.truncated[i] = false;
    });
  }

  // Throws std::invalid_argument for a wrong action and before the first reset.
  void step(const int64_t* actions, const VectorOutputs& outputs) {
    prepare_step("step", actions, outputs);
    loop_.run([this](int thread, int i) { step_one(i, thread); });
  }

  // step() in two halves; outputs must live until receive() has returned.
  void send(const int64_t* actions, const VectorOutputs& outputs) {
    prepare_step("send", actions, outputs);
    is_sent_ = true;
    loop_.start([this](int thread, int i) { step_one(i, thread); });
  }
  void receive() {
    if (!is_sent_) throw std::invalid_argument("recv: call send first");
    loop_.wait();
    is_sent_ = false;
  }
  bool is_sent() const { return is_sent_; }

  // The current observation and numbers of all environments, without a step.
  void observe(const VectorOutputs& outputs) {
    check_idle("observe");
    for (int i = 0; i < num_envs(); ++i) write(i, outputs);
  }

  int picture_height(int i) const { return atari::height(*game(i).game); }

  // The last frame that was drawn, uint8 [picture_height, kWidth, 3].
  void render(int i, uint8_t* rgb) {
    check_idle("render");
    check_index(i);
    const Environment& env = environment(i);
    const uint8_t* screen = picture(env.machine, env.screens);
    const bool pal = is_pal(*game(i).game);
    for (int p = 0; p < picture_height(i) * kWidth; ++p) {
      const uint32_t color = color_of(screen[p], pal);
      for (int c = 0; c < 3; ++c) *rgb++ = static_cast<uint8_t>(color >> (16 - 8 * c));
    }
  }

  const uint8_t* ram_of(int i) {
    check_idle("ram");
    check_index(i);
    return ram(environment(i).machine);
  }

  // From now on this game runs its program from a shared object, see translation.h.
  // Nothing else changes, so this may come between any two steps.
  void use_translation(const std::string& name, const std::string& path) {
    check_idle("use_translation");
    for (Playable& playable : games_) {
      if (playable.name == name) playable.game = load_translation(*playable.game, path);
    }
  }

  // All of one environment, for any vector with the same game, observations and build.
  // Not meant for bytes from strangers: a state is checked for accidents, not for
  // malice.
  std::string get_state(int i) {
    check_idle("get_state");
    check_index(i);
    const std::byte* from = first_ + i * stride_;
    const StateHeader header = make_header(i, checksum({from, stride_}));
    std::string state(sizeof header + stride_, '\0');
    std::memcpy(state.data(), &header, sizeof header);
    std::memcpy(state.data() + sizeof header, from, stride_);
    return state;
  }
  void set_state(int i, std::string_view state) {
    check_idle("set_state");
    check_index(i);
    StateHeader header;
    if (state.size() != sizeof header + stride_) {
      throw std::invalid_argument(
          "set_state: got " + std::to_string(state.size()) + " bytes, expected " +
          std::to_string(sizeof header + stride_) +
          " from get_state of an environment with the same options");
    }
    std::memcpy(&header, state.data(), sizeof header);
    const auto* bytes =
        reinterpret_cast<const std::byte*>(state.data() + sizeof header);
    const StateHeader expected = make_header(i, header.checksum);
    if (std::memcmp(header.game, expected.game, sizeof header.game) != 0) {
      throw std::invalid_argument(
          "set_state: a state of " +
          std::string(header.game, strnlen(header.game, sizeof header.game)) +
          " for environment " + std::to_string(i) + ", which plays " +
          games_[game_of_[i]].name);
    }
    if (std::memcmp(&header, &expected, sizeof header) != 0) {
      throw std::invalid_argument(
          "set_state: a state from other options or another version");
    }
    if (checksum({bytes, stride_}) != header.checksum) {
      throw std::invalid_argument("set_state: the state is damaged");
    }
    std::memcpy(first_ + i * stride_, bytes, stride_);
  }

 private:
  struct Environment {
    Machine machine;
    Screens screens;
    Random noops;
    int32_t elapsed;  // Frames of this episode that an action was held for.
    int32_t lives;
    int32_t newest;  // Plane of the stack.
    bool is_on, has_ended;
  };

  struct Playable {
    std::string name;
    std::shared_ptr<const Game> game;
    std::vector<int> actions;
    bool has_fire;
    std::vector<Preprocessor> channels;  // One for grey, three for RGB.
    // Just reset after being switched on. Seeds only make sticky actions random:
    // without these, all environments of a game begin so.
    std::unique_ptr<Environment> booted;
  };

  struct Scratch {
    std::vector<Preprocessor::Scratch> resize;  // Per game.
    std::vector<uint8_t> picture, pooled, planes;
  };

  struct StateHeader {
    char magic[8];
    char game[40];
    uint64_t size, stack, height, width, grey, rgb_max;
    uint64_t checksum;
  };

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void check_options() const {
    const VectorOptions& o = options_;
    const auto check = [](bool good, const char* name, int value, const char* wanted) {
      if (!good) {
        throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) +
                                    ": expected " + wanted);
      }
    };
    check(o.num_threads >= 1, "num_threads", o.num_threads, "1 or more");
    check(o.frame_skip >= 1, "frame_skip", o.frame_skip, "1 or more");
    check(o.stack >= 1, "stack", o.stack, "1 or more");
    check(o.noop_max >= 0, "noop_max", o.noop_max, "0 or more");
    check(o.max_frames >= 1, "max_frames", o.max_frames, "1 or more");
    if (!(o.sticky_probability >= 0.0 && o.sticky_probability <= 1.0)) {
      throw std::invalid_argument(
          "sticky_probability=" + std::to_string(o.sticky_probability) +
          ": expected 0 to 1");
    }
  }

  int num_channels() const { return options_.grey ? 1 : 3; }

  Playable prepare(NamedGame named) const {
    using Channel = Preprocessor::Channel;
    Playable playable{std::move(named.name), std::move(named.game), {}, false, {}, {}};
    if (options_.full_action_set) {
      // Skiing is the one game whose full set is smaller: it has no FIRE.
      const bool fires = playable.game->info.id != GameId::skiing;
      for (int a = 0; a < kNumActions; ++a) {
        if (fires || !atari::has_fire(a)) playable.actions.push_back(a);
      }
    } else {
      playable.actions = minimal_actions(*playable.game);
    }
    constexpr int kFire = 1;
    playable.has_fire =
        std::count(playable.actions.begin(), playable.actions.end(), kFire);
    const auto channels =
        options_.grey ? std::vector{Channel::kGrey}
                      : std::vector{Channel::kRed, Channel::kGreen, Channel::kBlue};
    for (const Channel channel : channels) {
      playable.channels.emplace_back(atari::height(*playable.game),
                                     is_pal(*playable.game), options_.height,
                                     options_.width, channel,
                                     options_.rgb_max ? Preprocessor::Maximum::kOfRgb
                                                      : Preprocessor::Maximum::kOfGrey,
                                     options_.simd);
    }
    return playable;
  }

  const Playable& game(int i) const {
    check_index(i);
    return games_[game_of_[i]];
  }
  Environment& environment(int i) {
    return *reinterpret_cast<Environment*>(first_ + i * stride_);
  }
  // Grey: what was resized last, per channel. With rgb_max: the last picture.
  uint8_t* held(int i) {
    return reinterpret_cast<uint8_t*>(first_ + i * stride_ + sizeof(Environment));
  }
  uint8_t* plane(int i, int which) {
    return held(i) + held_size_ + which * plane_size_;
  }

  void check_index(int i) const {
    if (i < 0 || i >= num_envs()) {
      throw std::invalid_argument("no environment " + std::to_string(i) + " of " +
                                  std::to_string(num_envs()));
    }
  }
  void check_idle(const char* what) const {
    if (is_sent_) {
      throw std::invalid_argument(std::string(what) + ": call recv first");
    }
  }

  void prepare_step(const char* what, const int64_t* actions,
                    const VectorOutputs& outputs) {
    check_idle(what);
    for (int i = 0; i < num_envs(); ++i) {
      const int count = static_cast<int>(games_[game_of_[i]].actions.size());
      if (!environment(i).is_on) {
        throw std::invalid_argument(std::string(what) + ": call reset first");
      }
      if (actions[i] < 0 || actions[i] >= count) {
        throw std::invalid_argument(std::string(what) + ": action " +
                                    std::to_string(actions[i]) + " of environment " +
                                    std::to_string(i) + ", expected 0 to " +
                                    std::to_string(count - 1));
      }
    }
    actions_.assign(actions, actions + num_envs());
    outputs_ = outputs;
  }

  void boot_if_cached(int g) {
    Playable& playable = games_[g];
    if (playable.booted || options_.sticky_probability > 0.0) return;
    playable.booted = std::make_unique<Environment>();
    Environment& env = *playable.booted;
    power_on(*playable.game, env.machine, env.screens, /*seed=*/0, 0.0);
    reset_game(*playable.game, env.machine, env.screens);
  }

  // Below bound, as libstdc++'s uniform_int_distribution draws it.
  static uint32_t draw_below(Random& random, uint32_t bound) {
    uint64_t product = uint64_t{next_random(random)} * bound;
    if (static_cast<uint32_t>(product) < bound) {
      const uint32_t least = (0u - bound) % bound;
      while (static_cast<uint32_t>(product) < least) {
        product = uint64_t{next_random(random)} * bound;
      }
    }
    return static_cast<uint32_t>(product >> 32);
  }

  void reset_one(int i, std::optional<uint32_t> seed, int thread) {
    Environment& env = environment(i);
    const Playable& playable = games_[game_of_[i]];
    const Game& game = *playable.game;
    if (seed && playable.booted) {
      env.machine = playable.booted->machine;
      env.screens = playable.booted->screens;
      seed_random(env.machine.sticky_random, *seed);
    } else {
      if (seed) {
        power_on(game, env.machine, env.screens, *seed, options_.sticky_probability);
      }
      reset_game(game, env.machine, env.screens);
    }
    if (seed) {
      seed_random(env.noops, *seed);
      env.is_on = true;
    }
    // FIRE comes first and counts as one of the no-ops.
    int num_noops = 0;
    if (options_.noop_max > 0) {
      num_noops = static_cast<int>(draw_below(env.noops, options_.noop_max));
    }
    const bool fires = options_.fire_reset && playable.has_fire;
    const int num_frames = fires ? std::max(num_noops, 1) : num_noops;
    for (int f = 0; f < num_frames; ++f) {
      act(game, env.machine, env.screens, f == 0 && fires, f == num_frames - 1);
    }
    env.elapsed = 0;
    env.lives = lives(env.machine);
    env.has_ended = false;
    env.newest = 0;
    const uint8_t* screen = picture(env.machine, env.screens);
    see(i, nullptr, screen, plane(i, 0), thread);
    for (int p = 1; p < options_.stack; ++p) {
      if (options_.pad_with_first) {
        std::memcpy(plane(i, p), plane(i, 0), plane_size_);
      } else {
        std::memset(plane(i, p), 0, plane_size_);
      }
    }
  }

  void step_one(int i, int thread) {
    Environment& env = environment(i);
    const VectorOutputs& out = outputs_;
    if (env.has_ended) {
      reset_one(i, std::nullopt, thread);
      out.rewards[i] = 0;
      out.terminated[i] = out.truncated[i] = false;
    } else {
      play(i, thread);
      if (env.has_ended && options_.same_step_reset) {
        write_observation(i, out.final_observations + i * observation_size());
        reset_one(i, std::nullopt, thread);
      }
    }
    write(i, out);
  }

  void play(int i, int thread) {
    Environment& env = environment(i);
    const Playable& playable = games_[game_of_[i]];
    const Game& game = *playable.game;
    const int action = playable.actions[actions_[i]];
    const int skip = options_.frame_skip;
    const int first_seen = skip - (options_.max_pool ? 2 : 1);
    const uint8_t* older = nullptr;
    int reward = 0, frame = 0;
    bool over = false, truncated = false, life_lost = false, ended = false;
    for (; frame < skip; ++frame) {
      reward += act(game, env.machine, env.screens, action, frame >= first_seen);
      ++env.elapsed;
      over = is_over(env.machine);
      truncated = env.elapsed >= options_.max_frames;
      life_lost = lives(env.machine) < env.lives;
      ended = over || truncated || (options_.episodic_life && life_lost);
      if (ended) break;
      if (options_.max_pool && frame == skip - 2) older = keep(env, playable, thread);
    }
    env.lives = lives(env.machine);
    env.has_ended = ended;

    const uint8_t* before = plane(i, env.newest);
    env.newest = env.newest + 1 == options_.stack ? 0 : env.newest + 1;
    uint8_t* now = plane(i, env.newest);
    const uint8_t* latest = picture(env.machine, env.screens);
    if (!ended) {
      see(i, older, latest, now, thread);
    } else if (options_.rgb_max && frame >= first_seen) {
      // As the wrappers have it, the frame that ends the game is looked at; if it is
      // the last but one, the last of the step before stands in for the other.
      see(i, frame == skip - 2 ? held(i) : older, latest, now, thread);
    } else if (!options_.rgb_max && older) {
      // AtariVectorEnv takes no picture of a frame that ends the game, and its buffer
      // for the last frame still has the maximum of the step before.
      add_to_held(i, older, now, thread);
    } else if (now != before) {
      std::memcpy(now, before, plane_size_);
    }

    if (options_.clip_rewards) reward = (reward > 0) - (reward < 0);
    outputs_.rewards[i] = reward;
    outputs_.terminated[i] =
        over || ((options_.episodic_life || options_.life_loss_info) && life_lost);
    outputs_.truncated[i] = truncated;
  }

  // The picture now, where the next frame does not overwrite it.
  const uint8_t* keep(const Environment& env, const Playable& playable, int thread) {
    const uint8_t* screen = picture(env.machine, env.screens);
    if (!env.machine.tia.partial) return screen;  // The next goes to the other buffer.
    auto& copy = scratch_[thread].picture;
    std::memcpy(copy.data(), screen, atari::height(*playable.game) * kWidth);
    return copy.data();
  }

  void see(int i, const uint8_t* older, const uint8_t* latest, uint8_t* to,
           int thread) {
    const size_t size = atari::height(*games_[game_of_[i]].game) * size_t{kWidth};
    uint8_t* pooled = options_.rgb_max ? scratch_[thread].pooled.data() : held(i);
    each_channel(i, to, thread,
                 [&](const Preprocessor& channel, int c, uint8_t* plane,
                     Preprocessor::Scratch& scratch) {
                   channel.run(older, latest, pooled + c * size, plane, scratch);
                 });
    if (options_.rgb_max) std::memcpy(held(i), latest, size);
  }

  void add_to_held(int i, const uint8_t* screen, uint8_t* to, int thread) {
    const size_t size = atari::height(*games_[game_of_[i]].game) * size_t{kWidth};
    each_channel(i, to, thread,
                 [&](const Preprocessor& channel, int c, uint8_t* plane,
                     Preprocessor::Scratch& scratch) {
                   channel.add(screen, held(i) + c * size, plane, scratch);
                 });
  }

  template <class Fn>
  void each_channel(int i, uint8_t* to, int thread, Fn fn) {
    const Playable& playable = games_[game_of_[i]];
    auto& resize = scratch_[thread].resize[game_of_[i]];
    if (options_.grey) return fn(playable.channels[0], 0, to, resize);
    const size_t size = plane_size_ / 3;
    uint8_t* planes = scratch_[thread].planes.data();
    for (int c = 0; c < 3; ++c) {
      fn(playable.channels[c], c, planes + c * size, resize);
      for (size_t p = 0; p < size; ++p) to[3 * p + c] = planes[c * size + p];
    }
  }

  void write_observation(int i, uint8_t* to) {
    const int newest = environment(i).newest;
    const size_t older = options_.stack - 1 - newest;  // Planes behind the newest.
    std::memcpy(to, plane(i, newest + 1), older * plane_size_);
    std::memcpy(to + older * plane_size_, plane(i, 0), (newest + 1) * plane_size_);
  }

  void write(int i, const VectorOutputs& out) {
    const Machine& machine = environment(i).machine;
    write_observation(i, out.observations + i * observation_size());
    out.lives[i] = lives(machine);
    out.frame_numbers[i] = frame_number(machine);
    out.episode_frame_numbers[i] = episode_frame_number(machine);
  }

  StateHeader make_header(int i, uint64_t checksum) const {
    StateHeader header;
    std::memset(&header, 0, sizeof header);
    std::memcpy(header.magic, "atari-1", 8);
    const std::string& name = games_[game_of_[i]].name;
    std::memcpy(header.game, name.data(), std::min(name.size(), sizeof header.game));
    header.size = stride_;
    header.stack = options_.stack;
    header.height = options_.height;
    header.width = options_.width;
    header.grey = options_.grey;
    header.rgb_max = options_.rgb_max;
    header.checksum = checksum;
    return header;
  }

  static uint64_t checksum(std::span<const std::byte> bytes) {
    uint64_t sum = 0xCBF29CE484222325u;  // FNV-1a, 8 bytes at a time.
    for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + at, 8);
      sum = (sum ^ word) * 0x100000001B3u;
      sum ^= sum >> 29;
    }
    return sum;
  }

  const VectorOptions options_;
  const std::vector<int> game_of_;
  std::vector<Playable> games_;
  size_t plane_size_ = 0, held_size_ = 0, stride_ = 0;
  // An Environment each, then what held() and plane() give, stride_ apart.
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* first_ = nullptr;
  std::vector<Scratch> scratch_;  // Per thread.
  std::vector<int64_t> actions_;
  VectorOutputs outputs_{};
  bool is_sent_ = false;
  SharedLoop loop_;  // Last: its threads use all of the above.
};

}  // namespace beast::atari
