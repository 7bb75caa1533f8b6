# SPDX-License-Identifier: Apache-2.0
"""The forks in examples/ still apply to the files that they change, and train."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("name", "args"), [("loss", ["--env=CartPole-v1"]), ("minatar", []), ("minigrid", [])]
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
