# SPDX-License-Identifier: Apache-2.0
"""An environment whose simulator writes a lot to stderr, but only in tests.

LOUD in the process environment says how: "works", or "fails" after the words.
"""

import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np


class Loud(gym.Env):
    """Episodes of five steps; each step of a test writes 100 KB to stderr."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        if "--mode=test" in sys.argv:
            # Bytes of a picture are no UTF-8.
            sys.stderr.buffer.write(b"\xff\xd8 warning: slow shader\n" * 5000)
            sys.stderr.flush()
            if os.environ["LOUD"] == "fails":
                raise RuntimeError("the simulator lost its licence")
        return np.zeros(2, np.float32), 1.0, self.count >= 5, False, {}


gym.register("Loud-v0", Loud)
