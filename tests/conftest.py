# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: flags, runs as real processes, waiting with a deadline."""

import contextlib
import csv
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import monobeast

ROOT = pathlib.Path(__file__).parent.parent


def make_flags(*args, **kwargs):
    """Checked flags of monobeast: make_flags("--use_lstm", env="CartPole-v1")."""
    given = [f"--{name}={value}" for name, value in kwargs.items()]
    flags = monobeast.parser.parse_args([*args, *given])
    monobeast.check_flags(flags)
    return flags


def wait_for(condition, what, seconds=60):
    """The first true value of condition(), asked until the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


def read_logs(path):
    """Rows of a run's logs.csv as they are now."""
    if not (path / "logs.csv").exists():
        return []
    with (path / "logs.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["learner_wait"]]


def children(pid):
    """Pids of the live child processes of pid."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(name.split()[0]))
    return found


def alive(pid):
    try:
        return (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


class Process:
    """`python -m monobeast ...` as a user starts it, in a session of its own."""

    def __init__(self, tmp_path, *args, env=None, wrapper=()):
        self.path = tmp_path / "runs" / "test"
        self.output = tmp_path / f"output-{time.monotonic_ns()}"
        common = ["--log_s=0.2", f"--savedir={tmp_path / 'runs'}", "--xpid=test"]
        with self.output.open("w") as file:
            self.popen = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "monobeast", *common, *args],
                cwd=ROOT,
                env=os.environ | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.popen.pid

    def text(self):
        return self.output.read_text()

    def step(self):
        """Steps trained according to the log, 0 at first; fails if the run ended."""
        assert self.popen.poll() is None, self.text()
        rows = read_logs(self.path)
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_step(self, step, seconds=60):
        return wait_for(lambda: self.step() >= step and self.step(), self.text, seconds)

    def wait(self, seconds=90):
        """Exit code; the run must end by itself."""
        return self.popen.wait(timeout=seconds)

    def actors(self):
        """Pids of the actor processes, without Python's resource tracker."""
        return [
            pid
            for pid in children(self.pid)
            if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(timeout=10)


@pytest.fixture
def start(tmp_path):
    """Starts monobeast processes and takes them down after the test."""
    processes = []

    def begin(*args, **kwargs):
        processes.append(Process(tmp_path, *args, **kwargs))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
