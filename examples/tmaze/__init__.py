# SPDX-License-Identifier: Apache-2.0
"""A T-maze: what is seen at the start decides what is right at the end.

    python -m polybeast --env examples.tmaze:TMaze-v0 --use_lstm

The agent sees on which side the prize will be, once. Then it walks down a corridor for
`length` steps that look alike, whatever it does, to a junction where its action is the
side to which it turns: 1 for that of the prize, 0 for the other. Without memory no player
does better than 0.5 on average. (After Bakker, 2002, "Reinforcement Learning with Long
Short-Term Memory", where it has to find the way through the corridor too.)
"""

from typing import Any

import gymnasium as gym
import numpy as np

LEFT, RIGHT = range(2)


class TMaze(gym.Env):
    """Observation: [prize is left, prize is right, this is the junction], of 0 and 1."""

    observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        self.prize = int(self.np_random.integers(2))
        return np.eye(3, dtype=np.float32)[self.prize], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        is_turning = self.place == self.length
        reward = float(is_turning and action == self.prize)
        self.place += 1
        obs = np.zeros(3, np.float32)
        obs[2] = self.place == self.length
        return obs, reward, is_turning, False, {}


gym.register("TMaze-v0", entry_point="examples.tmaze:TMaze")
