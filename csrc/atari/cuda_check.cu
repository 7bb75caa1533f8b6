// SPDX-License-Identifier: Apache-2.0
// That the engine's headers compile for CUDA devices: one thread runs one environment.
// Compiled by a test, never run: we have no GPU here.
#include "atari/engine.h"

namespace beast::atari {

__global__ void act_kernel(const Game* game, Machine* machines, Screens* screens,
                           const int* actions, int* rewards, int count, bool draw) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  rewards[i] = act(*game, machines[i], screens[i], actions[i], draw);
  if (is_over(machines[i])) reset_game(*game, machines[i], screens[i]);
}

}  // namespace beast::atari
