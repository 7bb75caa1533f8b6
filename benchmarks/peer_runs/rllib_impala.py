# SPDX-License-Identifier: Apache-2.0
"""RLlib's IMPALA at the work of benchmarks/peers.py, until SIGTERM.

    build/peers/rllib/bin/python benchmarks/peer_runs/rllib_impala.py --num_workers 1

Counted are the steps learned from, each once. Atari is preprocessed by gymnasium's
wrappers. The network is ours: RLlib's own for these sizes pads, which costs more.
"""

import argparse
import collections
import functools
import json
import os
import secrets
import signal
import statistics
import time
from typing import Any

import gymnasium as gym
import ray
import torch
import torch.nn.functional as F
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="PongNoFrameskip-v4")
parser.add_argument("--num_workers", default=1, type=int, help="processes that act")
parser.add_argument("--envs_per_worker", default=16, type=int)
parser.add_argument("--num_learners", default=0, type=int, help="processes; 0: the main one")  # fmt: skip
parser.add_argument("--batch_size", default=320, type=int, help="steps per update")
parser.add_argument("--threads", default=1, type=int, help="of PyTorch in the learner")
parser.add_argument("--unroll_length", default=20, type=int, help="T")
parser.add_argument("--seed", default=1, type=int)


class Report:
    """report(steps, mean) prints both; stopped is true after SIGTERM.

    mean is the mean return of the last 100 games, None before the first has ended.
    """

    def __init__(self) -> None:
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        self.began = time.monotonic()

    def _stop(self, *unused: object) -> None:
        self.stopped = True

    def __call__(self, steps: float, mean: float | None) -> None:
        seconds = time.monotonic() - self.began
        row = {"seconds": seconds, "steps": int(steps), "return": mean}
        print(json.dumps(row), flush=True)


class Shallow(TorchRLModule, ValueFunctionAPI):
    """monobeast's shallow network for [N, 4, 84, 84]."""

    def setup(self) -> None:
        self.convs = nn.Sequential(
            nn.Conv2d(self.observation_space.shape[0], 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Linear(64 * 7 * 7, 512)
        self.policy = nn.Linear(512, int(self.action_space.n))
        self.value = nn.Linear(512, 1)

    def embed(self, batch: dict[str, Any]) -> Tensor:
        x = self.convs(batch[Columns.OBS].float() / 255)
        return F.relu(self.fc(x.flatten(1)))  # [N, 512]

    def _forward(self, batch: dict[str, Any], **unused: Any) -> dict[str, Tensor]:
        return {Columns.ACTION_DIST_INPUTS: self.policy(self.embed(batch))}

    def _forward_train(self, batch: dict[str, Any], **unused: Any) -> dict[str, Tensor]:
        x = self.embed(batch)
        return {Columns.ACTION_DIST_INPUTS: self.policy(x), Columns.EMBEDDINGS: x}

    def compute_values(
        self, batch: dict[str, Any], embeddings: Tensor | None = None
    ) -> Tensor:
        x = self.embed(batch) if embeddings is None else embeddings
        return self.value(x).squeeze(-1)


def make_atari(env_id: str, unused_config: Any) -> gym.Env:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make(env_id, frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4)
    env = gym.wrappers.ClipReward(env, -1.0, 1.0)
    return gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")


def main(flags: argparse.Namespace) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Nothing is sent anywhere.
    # Its own for each run: Ray would else leave one in the home directory.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    torch.set_num_threads(flags.threads)
    # Ray starts no process without a core to give it; the system shares them out.
    num_cpus = flags.num_workers + flags.num_learners + 2
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    report = Report()  # After Ray, which has a SIGTERM handler of its own.
    register_env("peer", functools.partial(make_atari, flags.env))
    config = (
        IMPALAConfig()
        .environment("peer")
        .env_runners(
            num_env_runners=flags.num_workers,
            num_envs_per_env_runner=flags.envs_per_worker,
            rollout_fragment_length=flags.unroll_length,
        )
        .learners(num_learners=flags.num_learners)
        .training(
            train_batch_size_per_learner=flags.batch_size,
            grad_clip=40.0,
            lr=6e-4,
            vf_loss_coeff=0.5,
            entropy_coeff=0.01,
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Shallow))
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=flags.seed)
    )
    algorithm = config.build_algo()
    returns: collections.deque[float] = collections.deque(maxlen=100)
    while not report.stopped:
        result = algorithm.train()
        learners = result.get("learners", {}).get("__all_modules__", {})
        # Counted with the row after each rollout, which is only bootstrapped from.
        rows = learners.get("num_env_steps_trained_lifetime", 0)
        if rows:  # Else it has not begun to learn.
            steps = rows * flags.unroll_length / (flags.unroll_length + 1)
            # It gives the mean of the games that ended in this second or so; the rewards
            # are clipped ones, which in Pong are as they were.
            acting = result.get("env_runners", {})
            num_games = int(acting.get("num_episodes", 0))
            if num_games and "episode_return_mean" in acting:
                returns.extend([float(acting["episode_return_mean"])] * num_games)
            report(steps, statistics.mean(returns) if returns else None)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(parser.parse_args())
