// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "env_spec.h"

namespace beast {

// What K environments say after a step; an Environment fills it in.
struct EnvOutput {
  explicit EnvOutput(int64_t num_envs)
      : reward(num_envs),
        terminated(num_envs),
        truncated(num_envs),
        game_over(num_envs, 1),
        carried_return(num_envs),
        carried_steps(num_envs) {}

  // For each leaf of the space, where the bytes of [K, *shape] belong; not aligned.
  std::vector<std::byte*> observation;
  std::vector<float> reward;
  std::vector<uint8_t> terminated, truncated;  // How the last action ended an episode.
  // Whether an ending also ends the game, or only a life of it.
  std::vector<uint8_t> game_over;
  // What was earned in steps that no row shows, before the first row of an episode.
  std::vector<float> carried_return;
  std::vector<int32_t> carried_steps;
};

// K environments that step together and reset on the next step: in the step after the
// one that ended an episode, the action is ignored and the observation is the first of
// the next episode. Used by one thread at a time, though not always the same. Whatever
// a method throws reaches the learner with its text.
class Environment {
 public:
  virtual ~Environment() = default;
  virtual const EnvSpec& spec() const = 0;
  virtual void reset(EnvOutput& output) = 0;  // Called once, before all steps.
  // actions[i] is the bytes of [K, *shape] for leaf i of the space; not aligned.
  virtual void step(const std::vector<const std::byte*>& actions,
                    EnvOutput& output) = 0;
};

}  // namespace beast
