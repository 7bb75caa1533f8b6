# SPDX-License-Identifier: Apache-2.0
"""The forks in examples/ still apply to the files that they change, and train."""

import os
import shutil
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from examples.tmaze import LEFT, RIGHT
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("name", "args"), [("loss", ["--env=CartPole-v1"]), pytest.param("minatar", [], marks=pytest.mark.slow), ("minigrid", [])]
)  # fmt: skip
def test_a_fork_applies_and_trains(tmp_path, name, args):
    for file in ("polybeast.py", "polybeast_env.py"):
        shutil.copy(ROOT / file, tmp_path)
    diff = ROOT / "examples" / name / "fork.diff"
    subprocess.run(["git", "apply", diff], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "polybeast", "--num_servers=1", "--xpid=fork"]
    result = subprocess.run(
        [*command, "--total_steps=640", "--batch_size=4", *args],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    saved = torch.load(tmp_path / "runs/fork/model.tar", weights_only=True)
    assert saved["step"] == 640
    changed = [line for line in diff.read_text().splitlines() if line[:1] in "+-"]
    assert len(changed) < 100  # A fork is a small thing.


def test_a_t_maze_pays_for_the_side_that_was_shown():
    env = gym.make("examples.tmaze:TMaze-v0")
    check_env(env.unwrapped, skip_render_check=True)
    shown = set()
    for seed in range(10):
        obs, _ = env.reset(seed=seed)
        assert obs.sum() == obs[:2].sum() == 1
        prize = LEFT if obs[0] else RIGHT
        shown.add(prize)
        for i in range(10):
            obs, reward, terminated, _, _ = env.step(RIGHT)
            assert (obs == [0, 0, i == 9]).all()
            assert not reward
            assert not terminated
        side = prize if seed % 2 else LEFT + RIGHT - prize
        _, reward, terminated, _, _ = env.step(side)
        assert terminated
        assert reward == (side == prize)
    assert shown == {LEFT, RIGHT}
