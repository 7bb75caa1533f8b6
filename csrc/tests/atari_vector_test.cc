// SPDX-License-Identifier: Apache-2.0
// The batch with a program of our own instead of a ROM, for the sanitizers; the tests
// in Python compare it with ale-py.
#include <memory>
#include <vector>

#include "atari/vector.h"
#include "check.h"

namespace beast::atari {
namespace {

constexpr GameInfo kSynthetic = {GameId::pong, "synthetic", "",  Mapper::k4K,
                                 0x1F,         34,          210, kJoysticks,
                                 kNoop,        0,           {}};

// Every frame has other colours and ends with a point for us, of which 21 end the game.
std::shared_ptr<const Game> make_synthetic() {
  const uint8_t program[] = {
      0x78, 0xD8, 0xA2, 0xFF, 0x9A,                                // Set up.
      0xA9, 0x02, 0x85, 0x00, 0x85, 0x02, 0x85, 0x02, 0x85, 0x02,  // VSYNC, 3 lines.
      0xA9, 0x00, 0x85, 0x00, 0x85, 0x01,                    // The picture begins.
      0xE6, 0x80, 0xA6, 0x80, 0xE6, 0x8E, 0xA0, 0x00,        // Count frames, points.
      0x86, 0x09, 0x85, 0x02, 0xE8, 0xE8, 0x88, 0xD0, 0xF7,  // 256 lines.
      0x85, 0x02, 0x85, 0x02, 0x4C, 0x05, 0xF0};
  std::vector<uint8_t> rom(4096, 0xEA);
  std::copy(std::begin(program), std::end(program), rom.begin());
  rom[0xFFC] = rom[0xFFE] = 0x00;
  rom[0xFFD] = rom[0xFFF] = 0xF0;
  return make_game(kSynthetic, rom);
}

struct Batch {
  Batch(int num_envs, const VectorOptions& options)
      : n(num_envs),
        vector({{"synthetic", make_synthetic()}}, std::vector<int>(n, 0), options),
        observations(n * vector.observation_size()),
        finals(n * vector.observation_size()) {
    const std::vector<std::optional<uint32_t>> seeds(n, 7);
    vector.reset(std::vector<bool>(n, true), seeds, outputs());
  }

  VectorOutputs outputs() {
    return {observations.data(),    rewards.data(), ends.get(),
            ends.get() + n,         numbers.data(), numbers.data() + n,
            numbers.data() + 2 * n, finals.data()};
  }

  void step(int t) {
    std::vector<int64_t> actions;
    for (int i = 0; i < n; ++i) actions.push_back((t + i) % 5);
    if (t % 2) {
      vector.step(actions.data(), outputs());
    } else {
      vector.send(actions.data(), outputs());
      vector.receive();
    }
    num_ends += std::count(ends.get(), ends.get() + 2 * n, true);
  }

  const int n;
  int64_t num_ends = 0;
  std::vector<int32_t> rewards = std::vector<int32_t>(n),
                       numbers = std::vector<int32_t>(3 * n);
  std::unique_ptr<bool[]> ends = std::make_unique<bool[]>(2 * n);
  Vector vector;
  std::vector<uint8_t> observations, finals;
};

TEST(threads_and_instructions_change_nothing) {
  for (int kind = 0; kind < 6; ++kind) {
    VectorOptions options;
    options.grey = kind != 1;
    options.rgb_max = kind == 2;
    options.same_step_reset = kind == 3;
    options.sticky_probability = kind == 4 ? 0.25 : 0.0;
    options.frame_skip = kind == 5 ? 1 : 4;
    options.stack = kind == 5 ? 1 : 4;
    options.max_frames = 21;
    Batch one(5, options);
    options.num_threads = 2;
    options.simd = ResizeSimd::kPlain;
    Batch two(5, options);
    options.num_threads = 4;
    Batch four(5, options);
    for (int t = 0; t < 24; ++t) {
      one.step(t);
      for (Batch* other : {&two, &four}) {
        other->step(t);
        CHECK(one.observations == other->observations);
        CHECK(one.rewards == other->rewards);
        CHECK(one.numbers == other->numbers);
      }
    }
    CHECK(one.num_ends > 0);
  }
}

TEST(a_state_goes_on_elsewhere) {
  Batch one(2, {}), other(3, {});
  for (int t = 0; t < 8; ++t) one.step(t);
  const std::string state = one.vector.get_state(0);
  other.vector.set_state(0, state);
  for (int t = 0; t < 8; ++t) {
    one.step(t);
    other.step(t);
    const size_t size = one.vector.observation_size();
    CHECK(std::equal(one.observations.begin(), one.observations.begin() + size,
                     other.observations.begin()));
  }
  std::string damaged = state;
  damaged[state.size() / 2] ^= 1;
  CHECK_THROWS(std::invalid_argument, other.vector.set_state(1, damaged), "damaged");
}

TEST(an_end_with_a_step_under_way_waits_for_it) {
  VectorOptions options;
  options.num_threads = 2;
  auto outlives = std::make_unique<Batch>(4, VectorOptions{});
  Batch batch(4, options);
  const std::vector<int64_t> actions(4, 0);
  batch.vector.send(actions.data(), outlives->outputs());
}

}  // namespace
}  // namespace beast::atari
