# SPDX-License-Identifier: Apache-2.0
"""Real processes, real signals, real full disks."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch

from tests.conftest import alive, wait_for

# One at a time: they look for what others leave in shared memory.
pytestmark = pytest.mark.xdist_group("shared memory")

LONG = ("--total_steps=1000000000", "--envs_per_actor=4", "--batch_size=4")
CARTPOLE = ("--env=CartPole-v1", *LONG)
TROUBLED = ("--env=tests.envs:Troubled-v0", *LONG)


def shared_memory():
    return {path.name for path in pathlib.Path("/dev/shm").iterdir()}


def session(pid):
    """Pids of the session that a process started leads."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(pid)], capture_output=True, text=True
    )
    return [int(x) for x in found.stdout.split() if alive(int(x))]


def assert_all_ended(run):
    """Python's resource tracker ends by itself, a moment after the learner."""
    wait_for(lambda: not session(run.pid), "processes left behind", seconds=3)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_leaves_nothing_behind(start, number, code):
    before = shared_memory()
    run = start(*CARTPOLE, "--num_actors=2")
    run.wait_for_step(2000)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # As a terminal does it: to the actors too.
    else:
        os.kill(run.pid, number)
    assert run.wait(seconds=10) == code, run.text()
    assert_all_ended(run)
    assert shared_memory() <= before
    assert "Traceback" not in run.text()
    assert (
        "resume with: python -m monobeast --env CartPole-v1 --xpid test" in run.text()
    )
    saved = torch.load(run.path / "model.tar", weights_only=True)
    assert saved["step"] >= 2000
    if number == signal.SIGINT:
        again = start(*CARTPOLE, "--num_actors=2")
        again.wait_for_step(saved["step"] + 2000)
        assert f"from step {saved['step']} " in again.text()


def test_a_killed_learner_leaves_no_orphan_and_resumes(start):
    before = shared_memory()
    run = start(*CARTPOLE, "--num_actors=2", "--checkpoint_s=0.3")
    wait_for((run.path / "model.tar").exists, "no checkpoint")
    actors = run.actors()
    assert len(actors) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not any(alive(pid) for pid in actors), "orphans", seconds=10)
    assert shared_memory() <= before
    step = torch.load(run.path / "model.tar", weights_only=True)["step"]
    again = start(*CARTPOLE, "--num_actors=2")
    again.wait_for_step(step + 1000)


def kill_actors(run, kills):
    """Kills a random actor `kills` times; each time another one must come and work."""
    rng = random.Random(0)
    for _ in range(kills):
        actors = wait_for(lambda: len(run.actors()) == 2 and run.actors(), run.text)
        victim = rng.choice(actors)
        # At a random moment: while starting, waiting, or in the middle of a rollout.
        time.sleep(rng.random())
        os.kill(victim, signal.SIGKILL)
        step = run.step()
        run.wait_for_step(step + 500)
        wait_for(lambda pid=victim: not alive(pid), run.text)
    assert run.text().count("died and is replaced") == kills


def test_killed_actors_are_replaced_and_the_run_goes_on(start):
    run = start(*CARTPOLE, "--num_actors=2")
    run.wait_for_step(500)
    kill_actors(run, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_killed_actors_cost_no_hang(start):
    run = start("--env=PongNoFrameskip-v4", *LONG, "--num_actors=2")
    run.wait_for_step(500)
    kill_actors(run, kills=50)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(seconds=10) == 143


def test_an_actor_that_raises_once_is_replaced(start, tmp_path):
    run = start(
        *TROUBLED,
        "--num_actors=2",
        env={"TROUBLE": f"raise-once {tmp_path / 'raised'}"},
    )
    run.wait_for_step(2000)
    assert "died and is replaced" in run.text()
    assert "ZeroDivisionError: the emulator fell over once" in run.text()


def test_an_actor_that_raises_again_and_again_ends_the_run(start):
    # Rollouts longer than an environment's life: no actor ever delivers one. The error
    # is not mistaken for a learner that is gone, and a thread does not hide it.
    run = start(
        *TROUBLED, "--num_actors=1", "--unroll_length=50", env={"TROUBLE": "eof"}
    )
    assert run.wait() == 1
    assert "died 3 times in a row without a rollout" in run.text()
    assert "EOFError: the game process is gone" in run.text()
    assert_all_ended(run)
    assert torch.load(run.path / "model.tar", weights_only=True)["step"] == 0


def test_a_signal_while_actors_start_is_quiet(start):
    run = start(*CARTPOLE, "--num_actors=2")
    wait_for(lambda: len(run.actors()) == 2, run.text)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(seconds=10) == 130
    assert "Traceback" not in run.text()
    assert_all_ended(run)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    path = tmp_path / "runs"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(start, small_disk):
    run = start(*CARTPOLE, "--num_actors=1", "--checkpoint_s=0.3")
    wait_for((run.path / "model.tar").exists, run.text)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
    assert run.wait() == 1, run.text()
    assert "no space left on the disk" in run.text()
    assert "the last checkpoint is as it was" in run.text()
    step = torch.load(run.path / "model.tar", weights_only=True)["step"]
    (small_disk / "filler").unlink()
    again = start(*CARTPOLE, "--num_actors=1")
    again.wait_for_step(step + 100)


def test_too_little_shared_memory_is_said_before_it_kills(start):
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    wrapper = ("unshare", "--mount", "sh", "-c", small, "sh")
    probe = subprocess.run([*wrapper, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("a mount namespace of our own is not permitted here")
    run = start("--env=PongNoFrameskip-v4", wrapper=wrapper)
    assert run.wait() == 1
    assert "MiB more of /dev/shm, 1 MiB are free" in run.text()
    assert "--shm-size" in run.text()
