# SPDX-License-Identifier: Apache-2.0
"""Environments that misbehave as real ones do; each says how."""

import os
import pathlib
import sys
from typing import Any

import gymnasium as gym
import numpy as np

from tests.envs import Counting


class Printing(Counting):
    """Prints 4 KB to stdout and to stderr with each step, as simulators do."""

    def step(self, action: Any) -> Any:
        print("x" * 4096)
        print("y" * 4096, file=sys.stderr)
        return super().step(action)


class Faulty(Counting):
    """Gives back what FAULT names, at its 30th step: nan_reward, none_reward, ...

    With a path behind it, "nan_reward PATH", only unless PATH exists.
    """

    observation_space = gym.spaces.Dict(
        {
            "count": gym.spaces.Box(-1e6, 1e6, (2,), np.float32),
            "more": gym.spaces.Box(-1, 1, (3,), np.float64),
        }
    )

    def _observation(self) -> Any:
        return {"count": super()._observation(), "more": np.zeros(3)}

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        what, _, path = os.environ["FAULT"].partition(" ")
        if self.count == 30 and not (path and pathlib.Path(path).exists()):
            if path:
                pathlib.Path(path).touch()
            if what == "nan_reward":
                reward = float("nan")
            elif what == "none_reward":
                reward = None
            elif what == "inf_observation":
                observation["more"][1] = np.inf
            elif what == "missing_key":
                del observation["more"]
        return observation, reward, *rest


class OwnGameOver(Counting):
    """Has a game_over of its own in its info, which is never true at an end."""

    def step(self, action: Any) -> Any:
        *results, info = super().step(action)
        return *results, info | {"game_over": False, "_game_over": "mine"}


class CloseRaises(Counting):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError("the window was gone already")


class Licensed(Counting):
    """Raises at the second learner of torchrun once the file LICENSE names exists."""

    def step(self, action: Any) -> Any:
        self.check()
        return super().step(action)

    def reset(self, **kwargs: Any) -> Any:
        self.check()
        return super().reset(**kwargs)

    def check(self) -> None:
        is_second = os.environ.get("RANK") == "1"
        if is_second and pathlib.Path(os.environ["LICENSE"]).exists():
            raise RuntimeError("the license server is gone")


class Showing(gym.Env):
    """Random observations of a given space; episodes of 9 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space: gym.Space) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 9, False, {}


BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
SPACES = {
    "IntegerKeys": gym.spaces.Dict({0: BOX, 10: BOX, 2: BOX}),
    "MixedKeys": gym.spaces.Dict({0: BOX, "zero": BOX}),
    "OneOf": gym.spaces.OneOf([BOX, gym.spaces.Discrete(3)]),
    "DictOfOneOf": gym.spaces.Dict({"one": gym.spaces.OneOf([BOX, BOX]), "box": BOX}),
    "OnlyText": gym.spaces.Dict({"mission": gym.spaces.Text(9)}),
    "Text": gym.spaces.Text(9),
    "TinyImages": gym.spaces.Box(0, 255, (3, 2, 2), np.uint8),
    "DeepImages": gym.spaces.Box(0, 60_000, (1, 40, 40), np.uint16),
}
for name, space in SPACES.items():
    gym.register(
        f"{name}-v0", "tests.envs.unruly:Showing", kwargs={"space": space},
        disable_env_checker=True,
    )  # fmt: skip
for env_class in (Printing, Faulty, OwnGameOver, CloseRaises, Licensed):
    gym.register(f"{env_class.__name__}-v0", f"tests.envs.unruly:{env_class.__name__}")
