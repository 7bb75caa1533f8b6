// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "environment.h"

namespace beast {

// Turns what K environments say into the fields of a row: which rows begin an episode,
// and the return and length of each game so far, lives of a game taken together.
class EpisodeCounter {
 public:
  explicit EpisodeCounter(int64_t num_envs);

  // Also sets the reward of rows that begin an episode to 0: nothing earned it.
  void update(EnvOutput& output);

  const std::vector<uint8_t>& first() const { return first_; }
  const std::vector<float>& episode_return() const { return episode_return_; }
  const std::vector<int32_t>& episode_step() const { return episode_step_; }

 private:
  std::vector<uint8_t> first_, ended_, game_over_;
  std::vector<float> episode_return_;
  std::vector<int32_t> episode_step_;
};

}  // namespace beast
