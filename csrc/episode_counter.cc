// SPDX-License-Identifier: Apache-2.0
#include "episode_counter.h"

namespace beast {

EpisodeCounter::EpisodeCounter(int64_t num_envs)
    : first_(num_envs),
      ended_(num_envs, 1),
      game_over_(num_envs, 1),
      episode_return_(num_envs),
      episode_step_(num_envs) {}

void EpisodeCounter::update(EnvOutput& output) {
  for (size_t k = 0; k < first_.size(); ++k) {
    first_[k] = ended_[k];
    if (first_[k]) output.reward[k] = 0;
    if (game_over_[k]) {
      episode_return_[k] = 0;
      episode_step_[k] = 0;
    }
    episode_return_[k] += output.reward[k] + output.carried_return[k];
    episode_step_[k] += (first_[k] ? 0 : 1) + output.carried_steps[k];
    ended_[k] = output.terminated[k] || output.truncated[k];
    game_over_[k] = ended_[k] && output.game_over[k];
  }
}

}  // namespace beast
