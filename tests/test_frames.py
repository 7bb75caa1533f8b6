# SPDX-License-Identifier: Apache-2.0
"""Images and stacked frames: what is sent of them, and how they lie in memory."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

import atari_wrappers
import polybeast
import rollouts
from tests.serving import Acting, concatenate, expected_rows, serve


class Frames(gym.Env):
    """Stacks of the last frames, which are random; a new episode stacks its first."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype="uint8", num_channels=4, length=7):
        high = 255 if dtype == "uint8" else 1
        shape = (num_channels, 5, 6)
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self.length = length
        self.random = np.random.default_rng(1)

    def frame(self):
        space = self.observation_space
        frame = self.random.random(space.shape[1:]) * space.high[0]
        return frame.astype(space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.stack = np.stack([self.frame()] * self.observation_space.shape[0])
        return self.stack, {}

    def step(self, action):
        self.steps += 1
        self.stack = np.concatenate([self.stack[1:], self.frame()[None]])
        return self.stack, 1.0, self.steps == self.length, False, {}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("num_channels", [1, 4])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_stacked_frames_arrive_whole(dtype, num_channels, channels_last):
    make = functools.partial(Frames, dtype, num_channels)
    with (
        serve(make, num_envs=2) as server,
        Acting(server.address(), num_envs=2, channels_last=channels_last) as acting,
    ):
        parts = [rows for rows, _ in acting.rollouts(10)]
    observation = torch.from_numpy(parts[0]["observation"])
    assert observation.shape == (5, 2, num_channels, 5, 6)
    images = observation.flatten(0, 1)  # A view where that can be.
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    rows = concatenate(parts)
    for k in range(2):
        expected = expected_rows(make(), rows["action"][:, k])
        assert expected["first"].sum() > 3
        for key, values in expected.items():
            np.testing.assert_array_equal(rows[key][:, k], values, err_msg=key)


class Recorded(gym.vector.VectorWrapper):
    """Keeps what its environments show."""

    def __init__(self, env, shown):
        super().__init__(env)
        self.shown = shown

    def reset(self, **options):
        observation, infos = self.env.reset(**options)
        self.shown.append(observation.copy())
        return observation, infos

    def step(self, actions):
        observation, *others = self.env.step(actions)
        self.shown.append(observation.copy())
        return observation, *others


@pytest.mark.parametrize("channels_last", [False, True])
def test_pong_arrives_as_it_is_shown(channels_last):
    shown = []

    def make():
        # Short games: 100 steps of four frames.
        pong = atari_wrappers.make_atari_vector("PongNoFrameskip-v4", 3, max_frames=400)
        return Recorded(pong, shown)

    def policy(rows, state):
        return {"action": (rows["episode_step"] % 6).astype(np.int64)}, state

    with (
        serve(make) as server,
        Acting(
            server.address(), policy, 20, num_envs=3, channels_last=channels_last
        ) as acting,
    ):
        rows = concatenate([rows for rows, _ in acting.rollouts(12)])
    assert rows["first"][1:].sum() >= 3
    assert len(rows["first"]) == 241
    np.testing.assert_array_equal(rows["observation"], shown[:241])


def test_a_model_with_channels_last_convolutions_gets_images_so():
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    for net, wanted in [("shallow", True), ("deep", True), ("mlp", False)]:
        model = polybeast.Net(space, 6, net, use_lstm=False)
        assert rollouts.is_channels_last(model) is wanted
    grid = gym.spaces.Box(0, 1, (4, 10, 10), bool)
    small = polybeast.Net(grid, 6, "small", use_lstm=False)
    assert not rollouts.is_channels_last(small)
