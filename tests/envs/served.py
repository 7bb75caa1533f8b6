# SPDX-License-Identifier: Apache-2.0
"""Environments that show what a server and an actor pool make of them."""

import os
import pathlib
import time
from typing import Any

import gymnasium as gym
import numpy as np

from tests.envs import Counting


class Echo(gym.Env):
    """Observations are the last action, in whatever space it is; ends never."""

    def __init__(self, space: gym.Space) -> None:
        self.action_space = self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.action_space.seed(seed)
        return self.action_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is none of my actions"
        return action, 1.0, False, False, {}


class Casts(gym.Env):
    """Whatever numpy turns into what the space says; rewards of several types."""

    action_space = gym.spaces.Discrete(2, start=-1)
    observation_space = gym.spaces.Dict(
        {
            "bools": gym.spaces.MultiBinary(2),
            "doubles": gym.spaces.Box(-9, 9, (2,), np.float32),
            "fortran": gym.spaces.Box(0, 255, (2, 3), np.uint8),
            "number": gym.spaces.Box(-9, 9, (), np.float32),
        }
    )

    def _observation(self) -> Any:
        return {
            "bools": [True, False],
            "doubles": np.array([1.5, -2.5]),
            "fortran": np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
            "number": 0.5,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rewards = [1, 2.5, np.float64(3), np.float32(4), np.array(5.0), True]
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert action in (-1, 0)
        reward = self.rewards.pop(0)
        return self._observation(), reward, np.bool_(not self.rewards), 0, {}


class OldGym(gym.Env):
    """As gym was before 0.26: reset gives an observation, step gives four values."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, reset_is_new: bool = False) -> None:
        self.reset_is_new = reset_is_new

    def reset(self, **unused_kwargs: Any) -> Any:
        observation = np.zeros(2, np.float32)
        return (observation, {}) if self.reset_is_new else observation

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class Seeded(gym.Env):
    """Observations come from the environment's own random numbers."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 1, (), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(), {}

    def step(self, action: Any) -> Any:
        return self.np_random.random(), 0.0, self.np_random.random() < 0.2, False, {}


class Life(Counting):
    """Observations are (process, step of this environment's life)."""

    observation_space = gym.spaces.Box(0, 2**62, (2,), np.int64)

    def _observation(self) -> np.ndarray:
        return np.array([os.getpid(), self.count], np.int64)


class Napping(Counting):
    """Action 1 makes the file that $NAPPING names, and takes half a second."""

    def step(self, action: Any) -> Any:
        if action == 1:
            pathlib.Path(os.environ["NAPPING"]).touch()
            time.sleep(0.5)
        return super().step(action)


class Broken(Counting):
    """Raises in __init__, reset or, at its third step, in step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "__init__":
            raise ZeroDivisionError("no emulator")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.where == "reset":
            raise ZeroDivisionError("no first frame")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.where == "step" and self.count == 2:
            raise ZeroDivisionError("no next frame")
        return super().step(action)


class Large(gym.Env):
    """Observations of a megabyte."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 255, (1 << 20,), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1 << 20, np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.ones(1 << 20, np.uint8), 0.0, False, False, {}


class Slow(Counting):
    """Thinks for 14 seconds before its third step."""

    def step(self, action: Any) -> Any:
        if self.count == 2:
            time.sleep(14)
        return super().step(action)
