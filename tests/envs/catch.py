# SPDX-License-Identifier: Apache-2.0
"""Catch: a ball falls through 10 rows of 5 cells, a paddle below is to be there."""

import gymnasium as gym
import numpy as np

ROWS, COLUMNS = 10, 5


class Catch(gym.Env):
    """Images [1, 10, 5] with two cells lit; 1 for a ball that is caught, else -1."""

    observation_space = gym.spaces.Box(0, 1, (1, ROWS, COLUMNS), np.uint8)
    action_space = gym.spaces.Discrete(3)  # Left, stay, right.
    render_mode = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = 0
        self.column = int(self.np_random.integers(COLUMNS))
        self.paddle = COLUMNS // 2
        return self.picture(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, COLUMNS - 1))
        self.row += 1
        is_down = self.row == ROWS - 1
        reward = (1.0 if self.column == self.paddle else -1.0) if is_down else 0.0
        return self.picture(), reward, is_down, False, {}

    def picture(self):
        picture = np.zeros((1, ROWS, COLUMNS), np.uint8)
        picture[0, self.row, self.column] = 1
        picture[0, -1, self.paddle] = 1
        return picture


gym.register("Catch-v0", entry_point="tests.envs.catch:Catch")
