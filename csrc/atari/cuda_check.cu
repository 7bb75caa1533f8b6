// SPDX-License-Identifier: Apache-2.0
// That the engine's headers compile for CUDA devices: one thread runs one environment.
// Compiled by a test, never run: we have no GPU here. What the kernels call is run on
// the host by tests/test_atari_engine.py, in one phase and in two.
#include "atari/engine.h"

namespace beast::atari {

__device__ int thread_index() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void act_kernel(const Game* game, Machine* machines, Screens* screens,
                           const int* actions, int* rewards, int count, bool draw) {
  const int i = thread_index();
  if (i >= count) return;
  rewards[i] = act(*game, machines[i], screens[i], actions[i], draw);
  if (is_over(machines[i])) reset_game(*game, machines[i], screens[i]);
}

// The first phase of a step of four frames, of which the last two are looked at. A game
// that is over is reset instead, as with gymnasium's next-step autoreset.
__global__ void emulate_kernel(const Game* game, Machine* machines, Screens* screens,
                               TiaLog* logs, const int* actions, int* rewards,
                               int count) {
  const int i = thread_index();
  if (i >= count) return;
  rewards[i] = 0;
  logs[2 * i].count = logs[2 * i + 1].count = 0;
  if (is_over(machines[i])) {
    reset_game(*game, machines[i], screens[i]);
    return;
  }
  for (int frame = 0; frame < 4; ++frame) {
    TiaLog* log = frame < 2 ? nullptr : &logs[2 * i + frame - 2];
    rewards[i] += act(*game, machines[i], screens[i], actions[i], false, log);
  }
}

// The second phase: a thread per environment, which draws its frames in their order.
__global__ void draw_kernel(TiaLog* logs, int count) {
  const int i = thread_index();
  if (i >= count) return;
  draw_log(logs[2 * i]);
  draw_log(logs[2 * i + 1]);
}

}  // namespace beast::atari
