# SPDX-License-Identifier: Apache-2.0
"""Real processes, real signals, real full disks."""

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import monobeast
from tests.conftest import ROOT, alive, read_logs, wait_for

LONG = ("--total_steps=1000000000", "--envs_per_actor=4", "--batch_size=4")
CARTPOLE = ("--env=CartPole-v1", *LONG)
AGENTS = ["monobeast"]
if not os.environ.get("CHIMERA_NO_LIBBEAST"):
    AGENTS += ["polybeast"]
TROUBLED = ("--env=tests.envs:Troubled-v0", *LONG)


def shared_memory():
    return {path.name for path in pathlib.Path("/dev/shm").iterdir()}


def assert_nothing_new_stays(before):
    """Tests beside this one have names there for a moment only; a leak stays."""
    new = shared_memory() - before
    wait_for(lambda: not new & shared_memory(), f"left in shared memory: {new}", 10)


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
    assert_nothing_new_stays(before)
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
    assert_nothing_new_stays(before)
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


FULL = ("--env=CartPole-v1", "--num_actors=0", "--envs_per_actor=2", "--batch_size=2")
FULL += ("--unroll_length=5", "--log_s=0.001", "--checkpoint_s=0.02", "--xpid=test")


def leave_pages(disk, count):
    """Fills the disk but for so many pages of 4 KiB."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        filler.truncate(filler.tell() - count * 4096)


@pytest.mark.parametrize(
    "is_resumed", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_disk_that_is_full_at_any_write(small_disk, caplog, capsys, is_resumed):
    """Each time a bit later: meta.json, latest, logs.csv, events, model.tar."""
    args = [*FULL, f"--savedir={small_disk}"]
    said = set()
    for pages in range(0, 36, 2):
        shutil.rmtree(small_disk / "test", ignore_errors=True)
        if is_resumed:
            first = monobeast.parser.parse_args([*args, "--total_steps=50"])
            assert monobeast.main(first) == 0
        leave_pages(small_disk, pages)
        caplog.clear()
        flags = monobeast.parser.parse_args([*args, "--total_steps=600"])
        code = monobeast.main(flags)
        assert not list(small_disk.rglob("*.tmp"))
        if code:
            (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
            assert "no space left on the disk" in record.getMessage()
            said.add(record.getMessage().split(":")[0])
        (small_disk / "filler").unlink()
        if code:
            again = monobeast.parser.parse_args([*args, "--total_steps=700"])
            assert monobeast.main(again) == 0
            assert read_logs(small_disk / "test")[-1]["step"] == "700"
    assert len(said) == 2  # The directory, and model.tar.
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_results_of_a_test_are_shown_on_a_full_disk(small_disk, start):
    run = start(*CARTPOLE[:1], "--num_actors=0", "--total_steps=640")
    assert run.wait() == 0, run.text()
    leave_pages(small_disk, 0)
    for mode, is_shown in (("test", True), ("test_render", False)):
        test = start(f"--mode={mode}", "--num_test_episodes=2")
        assert test.wait() == 1, test.text()
        assert "no space left on the disk" in test.text()
        assert "Traceback" not in test.text()
        assert ("steps trained" in test.text()) == is_shown
    files = [p.name for p in run.path.rglob("*") if p.is_file()]
    assert not [name for name in files if "eval" in name or "mp4" in name]


@pytest.mark.slow
def test_a_read_only_directory_is_named_and_can_be_looked_at(small_disk, start):
    args = [*CARTPOLE[:1], "--num_actors=0"]
    run = start(*args, "--total_steps=640")
    assert run.wait() == 0, run.text()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = start(*args, "--total_steps=1280")
    new = start(*args, "--xpid=", "--total_steps=1280")
    test = start("--mode=test", "--num_test_episodes=2")
    video = start("--mode=test_render", "--num_test_episodes=2")
    for process in (again, new, test, video):
        assert process.wait() == 1, process.text()
        assert "Read-only file system" in process.text()
        assert "make it writable" in process.text()
        assert "Traceback" not in process.text()
    assert "steps trained" in test.text()  # The table.
    listed = subprocess.run(
        [sys.executable, "-m", "tools.runs", "--savedir", str(small_disk)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "640 of 640" in listed.stdout


# Adds the seconds in a file to the wall clock of the process.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) {
  long seconds = 0;
  FILE *file = fopen(getenv("CLOCK_JUMP"), "r");
  if (file && fscanf(file, "%ld", &seconds) != 1) seconds = 0;
  if (file) fclose(file);
  return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_jumps_of_the_clock_change_nothing(start, tmp_path, agent):
    library, jump = tmp_path / "clock.so", tmp_path / "jump"
    source = tmp_path / "clock.c"
    source.write_text(CLOCK)
    compile_it = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    subprocess.run(compile_it, check=True)
    jump.write_text("0")
    few = {"monobeast": ["--num_actors=1"], "polybeast": ["--num_servers=1"]}[agent]
    args = ["--env=CartPole-v1", "--total_steps=1000000000", "--checkpoint_s=0.5", *few]
    env = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(jump)}
    run = start(
        *args, "--eval_every=1000", "--num_test_episodes=1", agent=agent, env=env
    )
    step = run.wait_for_step(500)
    for seconds in (-86_400, 86_400, 400 * 86_400, -40 * 86_400, 0):
        jump.write_text(str(seconds))
        step = run.wait_for_step(step + 2000)
    before = (run.path / "model.tar").stat().st_ino
    wait_for(lambda: (run.path / "model.tar").stat().st_ino != before, run.text)
    wait_for((run.path / "evals.csv").exists, run.text)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait(20) == 143, run.text()
    assert not re.findall(r"WARNING \S+ (?!the test .* was broken off)", run.text())
    rows = read_logs(run.path)
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 200
    assert all(float(row["sps"]) > 0 for row in rows)
