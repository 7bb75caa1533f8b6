# SPDX-License-Identifier: Apache-2.0
"""What is done again and again: the rows of docs/reliability.md that need more code.

python -m pytest -m slow tests/test_reliability.py
"""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.conftest import ROOT, read_logs, wait_for
from tests.serving import Acting, serve

TEN_MB = (3, 1826, 1826)


class Pictures(gym.Env):
    """Observations of 10 MB that are all the number of the step."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 255, TEN_MB, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(TEN_MB, np.uint8), {}

    def step(self, action):
        self.steps += 1
        return np.full(TEN_MB, self.steps, np.uint8), 1.0, False, False, {}


def test_observations_of_ten_megabytes_arrive_whole():
    with (
        serve(Pictures, num_envs=2) as server,
        Acting(server.address(), num_envs=2, maximum_queue_size=2) as acting,
    ):
        for i, (rows, _) in enumerate(acting.rollouts(5)):
            for t, pictures in enumerate(rows["observation"]):
                assert (pictures == 4 * i + t).all()


ENDING = """
    import os, random, signal, sys, threading, time
    import libbeast
    import numpy as np
    from tests.envs import Counting

    signal.signal(signal.SIGINT, signal.default_int_handler)
    number = int(sys.argv[1])
    choose = random.Random(number)

    class Slow(Counting):
        def step(self, action):
            time.sleep(choose.random() * 0.002)
            return super().step(action)

    server = libbeast.Server(Slow, "localhost:0", num_envs=choose.choice([1, 3]))
    server.start()
    queue = libbeast.BatchingQueue(maximum_queue_size=choose.choice([1, 100]))
    batcher = libbeast.DynamicBatcher()
    pool = libbeast.ActorPool(4, queue, batcher, [server.address()] * 4)

    def infer():
        for batch in batcher:
            rows, state = batch.get_inputs()
            action = np.zeros_like(np.asarray(rows["last_action"]))
            batch.set_outputs(({"action": action}, state))

    def learn():
        for unused_batch in queue:
            pass

    def probe():
        while True:
            libbeast.probe(server.address(), 5)

    others = choose.sample([learn, probe, probe], choose.randint(0, 3))
    for body in (pool.run, infer, *others):
        threading.Thread(target=body, daemon=True).start()
    time.sleep(choose.random() * 0.3)
    if number % 3 == 0:
        sys.exit(3)
    if number % 3 == 1:
        os._exit(3)
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        threading.Event().wait(20)
    except KeyboardInterrupt:
        sys.exit(3)
"""


def check_ends(number):
    script = "\n".join(line[4:] for line in ENDING.splitlines())
    command = [sys.executable, "-c", script, str(number)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == 3, (number, ended.stderr)
    assert not {"Fatal", "terminate"} & {*ended.stderr.split()}, ended.stderr


@pytest.mark.parametrize("number", range(3))
def test_a_process_may_end_during_any_call(number):
    check_ends(number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_processes_end_during_any_call():
    for number in range(300):
        check_ends(number)


@pytest.mark.slow
def test_an_environment_that_fails_at_one_learner_costs_no_updates(start, tmp_path):
    """torchrun ends all learners; the first one saves what it has learned."""
    trouble = tmp_path / "trouble"
    run = start(
        "--env=tests.envs.unruly:Licensed-v0",
        "--num_servers=1",
        "--envs_per_server=4",
        "--batch_size=2",
        "--unroll_length=10",
        "--learner_threads=1",
        "--total_steps=1000000000",
        agent="polybeast",
        env={"LICENSE": str(trouble)},
        wrapper=[
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node=2", "--no-python"),
        ],
    )
    step = run.wait_for_step(2000)
    trouble.touch()
    assert run.wait(60) == 1, run.text()
    assert "RuntimeError: the license server is gone" in run.text()
    saved = torch.load(run.path / "model.tar", weights_only=True)
    assert saved["step"] >= step
    assert saved["step"] >= int(read_logs(run.path)[-1]["step"])
    wait_for(lambda: not members(run.pid), "processes left behind")


def members(session):
    """Pids of the live processes of a session."""
    found = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True
    )
    pairs = [line.split() for line in found.stdout.splitlines()]
    return [int(pid) for pid, state in pairs if state[0] != "Z"]
