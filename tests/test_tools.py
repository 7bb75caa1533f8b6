# SPDX-License-Identifier: Apache-2.0
"""tools.runs on real runs."""

import shutil
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, read_logs, wait_for

# On one worker: their runs are made once.
pytestmark = pytest.mark.xdist_group("tools")

SHORT = ["--env=CartPole-v1", "--num_actors=0", "--unroll_length=5", "--batch_size=2"]


def train(savedir, xpid, *args):
    """A run of monobeast as a process of its own."""
    where = [f"--savedir={savedir}", f"--xpid={xpid}", "--log_s=0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", "monobeast", *SHORT, *where, *args],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


def show(*args):
    command = [sys.executable, "-m", "tools.runs", *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four runs: finished, stopped, died, and one that is still running."""
    savedir = tmp_path_factory.mktemp("runs")
    assert train(savedir, "finished", "--total_steps=100").wait(60) == 0
    others = []
    try:
        for xpid, number in (("stopped", signal.SIGTERM), ("died", signal.SIGKILL), ("running", 0)):  # fmt: skip
            run = train(savedir, xpid, "--total_steps=1000000000", "--learning_rate=0.002")  # fmt: skip
            others.append(run)
            wait_for(lambda: len(read_logs(savedir / xpid)) > 2, xpid)  # noqa: B023
            if number:
                run.send_signal(number)
                run.wait(30)
        yield savedir
    finally:
        for run in others:
            run.kill()
            run.wait()


def test_every_run_is_listed_with_its_state(runs):
    shown = show("--savedir", runs)
    assert shown.returncode == 0, shown.stderr
    header, *lines = shown.stdout.splitlines()
    assert header.split()[:3] == ["run", "env", "agent"]
    states = {line.split()[0]: line.split()[-1] for line in lines[:4]}
    assert states == {name: name for name in ("finished", "stopped", "died", "running")}
    assert "100 of 100" in lines[0]
    assert "CartPole-v1" in lines[0]


def test_what_did_not_finish_can_be_resumed_by_the_command_shown(runs):
    lines = show("--savedir", runs).stdout.splitlines()
    resume = [line for line in lines if line.startswith("resume ")]
    assert [line.split(":")[0] for line in resume] == ["resume stopped", "resume died"]
    assert all(f"--savedir {runs}" in line and "--xpid" in line for line in resume)


def test_runs_of_sweeps_are_listed_too(runs, tmp_path):
    shutil.copytree(runs / "finished", tmp_path / "sweep" / "seed=1")
    shutil.copytree(runs / "finished", tmp_path / "alone")
    (tmp_path / "latest").symlink_to("alone")
    (tmp_path / "sweep" / "latest").symlink_to("seed=1")
    lines = show("--savedir", tmp_path).stdout.splitlines()[1:]
    assert sorted(line.split()[0] for line in lines) == ["alone", "sweep/seed=1"]


def test_two_runs_are_compared_by_their_flags(runs):
    lines = show(runs / "finished", runs / "stopped").stdout.splitlines()
    assert lines[1].split() == ["finished", "stopped"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["learning_rate"] == ["0.0006", "0.002"]
    assert rows["total_steps"] == ["100", "1000000000"]
    assert "batch_size" not in rows


def test_what_is_no_run_is_named(runs, tmp_path):
    assert "no runs in" in show("--savedir", tmp_path).stderr
    shown = show(runs / "finished", tmp_path)
    assert shown.returncode == 2
    assert f"{tmp_path} is no run" in shown.stderr
