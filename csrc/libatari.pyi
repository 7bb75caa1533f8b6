# SPDX-License-Identifier: Apache-2.0
"""What libatari, the Atari engine, gives Python. docs/atari.md explains it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

def supported_games() -> list[str]: ...
def headers() -> list[tuple[str, str]]: ...
def translate(rom: bytes, name: str) -> str: ...
def palette(pal: bool = False) -> list[int]: ...
def preprocess(
    older: Bytes | None,
    latest: Bytes,
    height: int = 84,
    width: int = 84,
    channel: str = "grey",
    rgb_max: bool = False,
    simd: str = "auto",
    repeats: int = 1,
    pal: bool = False,
) -> Bytes: ...

class Console:
    """One game without preprocessing. two_phase runs and draws in two steps, as a GPU
    would; any_rom takes a program of one's own in the place of the game."""

    def __init__(
        self,
        rom: bytes,
        name: str,
        seed: int = 0,
        sticky_probability: float = 0.0,
        *,
        two_phase: bool = False,
        any_rom: bool = False,
    ) -> None: ...
    def reset(self) -> None: ...
    def act(self, action: int, draw: bool = True) -> int: ...
    def run(self, actions: Bytes, draws: Bytes) -> int: ...
    def screen(self) -> Bytes: ...
    def ram(self) -> Bytes: ...
    def game_over(self) -> bool: ...
    def lives(self) -> int: ...
    def frame_number(self) -> int: ...
    def episode_frame_number(self) -> int: ...
    def minimal_actions(self) -> list[int]: ...
    def use_translation(self, path: str) -> None: ...
    def get_state(self) -> bytes: ...
    def set_state(self, state: bytes) -> None: ...

class Vector:
    """Environments stepped together; atari_wrappers.NativeAtariVectorEnv uses it.

    out holds the arrays that are written: observations, rewards, terminated, truncated,
    lives, frame_number, episode_frame_number and, with same_step_reset, final_obs.
    """

    num_envs: int
    num_threads: int
    bytes_per_env: int

    def __init__(
        self,
        games: Sequence[tuple[str, bytes]],
        game_of: Sequence[int],
        *,
        num_threads: int = 1,
        frame_skip: int = 4,
        stack: int = 4,
        height: int = 84,
        width: int = 84,
        grey: bool = True,
        max_pool: bool = True,
        rgb_max: bool = False,
        pad_with_first: bool = False,
        noop_max: int = 30,
        fire_reset: bool = True,
        episodic_life: bool = False,
        life_loss_info: bool = False,
        clip_rewards: bool = True,
        max_frames: int = 108_000,
        sticky_probability: float = 0.0,
        full_action_set: bool = False,
        same_step_reset: bool = False,
        simd: str = "auto",
    ) -> None: ...
    def reset(
        self,
        mask: Sequence[bool],
        seeds: Sequence[int | None],
        out: tuple[npt.NDArray[Any], ...],
    ) -> None: ...
    def step(
        self, actions: npt.NDArray[Any], out: tuple[npt.NDArray[Any], ...]
    ) -> None: ...
    def send(
        self, actions: npt.NDArray[Any], out: tuple[npt.NDArray[Any], ...]
    ) -> None: ...
    def recv(self) -> tuple[npt.NDArray[Any], ...]: ...
    def observe(self, out: tuple[npt.NDArray[Any], ...]) -> None: ...
    def render(self, index: int) -> Bytes: ...
    def ram(self, index: int) -> Bytes: ...
    def use_translation(self, game: str, path: str) -> None: ...
    def get_state(self, index: int) -> bytes: ...
    def set_state(self, index: int, state: bytes) -> None: ...
    def actions_of(self, index: int) -> list[int]: ...
