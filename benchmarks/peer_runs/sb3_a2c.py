# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3's A2C at the work of benchmarks/peers.py, until SIGTERM.

    build/peers/sb3/bin/python benchmarks/peer_runs/sb3_a2c.py --num_envs 16

Each update takes T steps of all environments once. Atari is preprocessed by gymnasium's
wrappers, which read the grey screen from the emulator and so are faster than SB3's own.
"""

import argparse
import functools
import json
import signal
import time

import gymnasium as gym
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="PongNoFrameskip-v4")
parser.add_argument("--num_envs", default=16, type=int)
parser.add_argument("--processes", action="store_true", help="one per environment")
parser.add_argument("--threads", default=2, type=int, help="of PyTorch")
parser.add_argument("--unroll_length", default=20, type=int, help="T")
parser.add_argument("--seed", default=1, type=int)


class Report(BaseCallback):
    """Prints steps and mean return of the last 100 games once a second; ends after SIGTERM."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        self.began = self.last = time.monotonic()

    def _stop(self, *unused: object) -> None:
        self.stopped = True

    def _on_step(self) -> bool:
        now = time.monotonic()
        if now >= self.last + 1:
            self.last = now
            games = [float(game["r"]) for game in self.model.ep_info_buffer or []]
            mean = sum(games) / len(games) if games else None
            steps = self.num_timesteps
            row = {"seconds": now - self.began, "steps": steps, "return": mean}
            print(json.dumps(row), flush=True)
        return not self.stopped


class SmallBody(BaseFeaturesExtractor):
    """monobeast's for grids of codes: one convolution, 128 features."""

    def __init__(self, space: gym.spaces.Box) -> None:
        super().__init__(space, features_dim=128)
        channels, height, width = space.shape
        num_flat = 16 * (height - 2) * (width - 2)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(num_flat, 128), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_atari(env_id: str) -> gym.Env:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make(env_id, frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4)
    env = gym.wrappers.ClipReward(env, -1.0, 1.0)
    return gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")


def make_minatar(env_id: str) -> gym.Env:
    import minatar.gym

    if env_id not in gym.registry:
        minatar.gym.register_envs()
    env = gym.make(env_id)
    height, width, channels = env.observation_space.shape
    space = gym.spaces.Box(0.0, 1.0, (channels, height, width))
    turn = lambda x: x.transpose(2, 0, 1).astype("float32")  # noqa: E731
    return gym.wrappers.TransformObservation(env, turn, space)


def main(flags: argparse.Namespace) -> None:
    torch.set_num_threads(flags.threads)
    is_minatar = flags.env.startswith("MinAtar/")
    make = functools.partial(make_minatar if is_minatar else make_atari, flags.env)
    kind = SubprocVecEnv if flags.processes else DummyVecEnv
    env = VecMonitor(kind([make] * flags.num_envs))
    body = SmallBody if is_minatar else NatureCNN  # Which is our shallow network.
    model = A2C(
        "CnnPolicy",
        env,
        n_steps=flags.unroll_length,
        policy_kwargs={"features_extractor_class": body, "net_arch": []},
        device="cpu",
        seed=flags.seed,
    )
    model.learn(10**12, callback=Report())
    env.close()


if __name__ == "__main__":
    main(parser.parse_args())
