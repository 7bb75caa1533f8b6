# SPDX-License-Identifier: Apache-2.0
"""Sample Factory's APPO at the work of benchmarks/peers.py, until SIGTERM.

    build/peers/sample_factory/bin/python benchmarks/peer_runs/sample_factory_appo.py

Its "convnet_atari" is our shallow network. Counted are the steps learned from, each
once. Atari is preprocessed by gymnasium's wrappers, faster than Sample Factory's own.
"""

import argparse
import json
import signal
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="PongNoFrameskip-v4")
parser.add_argument("--num_workers", default=2, type=int, help="processes")
parser.add_argument("--envs_per_worker", default=8, type=int, help="an even number")
parser.add_argument("--batch_size", default=320, type=int, help="steps per update")
parser.add_argument("--serial", action="store_true", help="all in one process")
parser.add_argument("--unroll_length", default=20, type=int, help="T")


class Report(AlgoObserver):
    """Prints the steps so far once a second; ends the training after SIGTERM."""

    def __init__(self) -> None:
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        self.began = self.last = time.monotonic()

    def _stop(self, *unused: object) -> None:
        self.stopped = True

    def on_training_step(self, runner: Any, unused_iteration: int) -> None:
        now = time.monotonic()
        if now >= self.last + 1:
            self.last = now
            row = {"seconds": now - self.began, "steps": sum(runner.env_steps.values())}
            print(json.dumps(row), flush=True)
        if self.stopped:
            runner.cfg.train_for_seconds = -1  # Looked at right after this call.


def make_atari(
    name: str, cfg: Any, env_config: Any, render_mode: Any = None
) -> gym.Env:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = gym.make(name, frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4)
    env = gym.wrappers.FrameStack(env, 4)
    # Lazy frames as the array that Sample Factory wants.
    return gym.wrappers.TransformObservation(env, np.asarray)


def main(flags: argparse.Namespace, train_dir: str) -> None:
    register_env(flags.env, make_atari)
    settings = {
        "env": flags.env,
        "algo": "APPO",
        "train_dir": train_dir,
        "experiment": "peer",
        "device": "cpu",
        "serial_mode": flags.serial,
        "async_rl": not flags.serial,
        "num_workers": flags.num_workers,
        "num_envs_per_worker": flags.envs_per_worker,
        "batch_size": flags.batch_size,
        "rollout": flags.unroll_length,
        "num_epochs": 1,
        "num_batches_per_epoch": 1,
        "use_rnn": False,
        "encoder_conv_architecture": "convnet_atari",
        "nonlinearity": "relu",
        "obs_scale": 255.0,
        "normalize_input": False,  # Less work for it.
        "normalize_returns": False,
        "with_vtrace": False,
        "reward_clip": 1.0,
        "decorrelate_envs_on_one_worker": False,  # Sooner at its steady rate.
        "env_frameskip": 1,  # So that a decision counts as one step.
    }
    args = [f"--{name}={value}" for name, value in settings.items()]
    sf_parser, _ = parse_sf_args(args)
    _, runner = make_runner(parse_full_cfg(sf_parser, args))
    runner.register_observer(Report())
    runner.init()
    runner.run()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(parser.parse_args(), scratch)
