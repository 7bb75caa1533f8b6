# SPDX-License-Identifier: Apache-2.0
"""Small real environments; `gymnasium.make("tests.envs:Counting-v0")` finds them."""

import os
import pathlib
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Counting(gym.Env):
    """Rewards count the steps of this environment's life: 1, 2, 3, ...

    The observation is (episode, step in the episode). An episode terminates after
    `length` steps; registered with a time limit, it is truncated before that.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)

    def __init__(self, length: int = 7) -> None:
        self.length = length
        self.count = 0
        self.episode = -1
        self.step_number = 0

    def _observation(self) -> np.ndarray:
        return np.array([self.episode, self.step_number], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.step_number = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert self.step_number < self.length, "stepped past the end of an episode"
        self.count += 1
        self.step_number += 1
        ended = self.step_number >= self.length
        return self._observation(), float(self.count), ended, False, {}


class Nested(gym.Env):
    """Dict and Tuple observations, a numpy scalar reward and extra info."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (5, 5, 3), np.uint8),
            "parts": gym.spaces.Tuple(
                (gym.spaces.Discrete(4), gym.spaces.Box(-1, 1, (2,), np.float64))
            ),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {"anything": object()}

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation = self.observation_space.sample()
        return observation, np.float64(1), self.steps == 9, False, {"extra": "text"}


class Life(Counting):
    """Observations are the process that made them, and its step in the episode."""

    def _observation(self) -> np.ndarray:
        return np.array([os.getpid(), self.step_number], np.float32)


class Troubled(Counting):
    """Does what the environment variable TROUBLE says, at its 30th step.

    raise: an exception each time; raise-once PATH: an exception unless PATH exists;
    hang-once PATH: sleeps for an hour; eof: EOFError, with a thread left running;
    nan: a reward that is no number; huge: one whose square is infinite.
    """

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.count == 30:
            what, _, path = os.environ["TROUBLE"].partition(" ")
            if what == "nan":
                reward = float("nan")
            elif what == "huge":
                reward = 1e30
            elif what == "eof":
                # As of a game in a process of its own; its thread outlives the error.
                threading.Thread(target=time.sleep, args=(3600,)).start()
                raise EOFError("the game process is gone")
            elif what == "raise":
                raise ZeroDivisionError("the emulator fell over")
            elif not pathlib.Path(path).exists():
                pathlib.Path(path).touch()
                if what == "hang-once":
                    time.sleep(3600)
                raise ZeroDivisionError("the emulator fell over once")
        return observation, reward, *rest


gym.register("Counting-v0", "tests.envs:Counting")
gym.register(
    "CountingLimit-v0",
    "tests.envs:Counting",
    max_episode_steps=5,
    kwargs={"length": 99},
)
gym.register("Life-v0", "tests.envs:Life", kwargs={"length": 1000})
gym.register("Nested-v0", "tests.envs:Nested")
gym.register("Troubled-v0", "tests.envs:Troubled")
