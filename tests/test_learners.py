# SPDX-License-Identifier: Apache-2.0
"""A learner on several cores, and several learners as torchrun starts them."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import learners
from tests.conftest import ROOT, alive, children, read_logs, wait_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = ("--env=CartPole-v1", "--num_servers=1", "--envs_per_server=4")
SMALL += ("--batch_size=2", "--unroll_length=5", "--learner_threads=1")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    learners.set_num_threads(3)
    yield
    learners.set_num_threads(before)


def test_split_gives_what_the_body_gives(three_threads):
    torch.manual_seed(1)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
    frozen, used = body[0].bias.requires_grad_(False), []
    parameters = list(body.parameters())

    def noted(x):
        used.append(x.shape[0])
        return body(x)

    x = torch.randn(100, 2, 8, 8)
    whole, split = body(x), learners.split(noted, x, parameters)
    assert sorted(used) == [32, 32, 36]
    torch.testing.assert_close(split, whole)
    (split**2).mean().backward(retain_graph=True)
    once = [p.grad.clone() for p in parameters if p is not frozen]
    for p in parameters:
        p.grad = None
    (split**2).mean().backward()  # Again, as it was kept.
    again = [p.grad.clone() for p in parameters if p is not frozen]
    for p in parameters:
        p.grad = None
    (whole**2).mean().backward()
    expected = [p.grad for p in parameters if p is not frozen]
    assert frozen.grad is None
    for a, b, c in zip(expected, once, again, strict=True):
        torch.testing.assert_close(b, a)
        assert torch.equal(b, c)  # The same sums in the same order.


def test_split_leaves_alone_what_it_cannot_help(three_threads):
    body, seen = nn.Linear(2, 2), []

    def noted(x):
        seen.append(x.shape[0])
        return body(x)

    few, many = torch.randn(20, 2), torch.randn(100, 2)
    learners.split(noted, few, list(body.parameters()))
    with torch.inference_mode():
        learners.split(noted, many, list(body.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        learners.split(noted, many, list(body.parameters()))
    learners.set_num_threads(1)
    learners.split(noted, many, list(body.parameters()))
    assert seen == [20, 100, 100, 100]


def test_split_keeps_its_threads_and_leaves_torch_one(three_threads):
    body, seen = nn.Linear(2, 2), []

    def noted(x):
        seen.append(x.shape[0])
        return body(x)

    for _ in range(2):
        learners.split(noted, torch.randn(99, 2), list(body.parameters()))
        assert torch.get_num_threads() == 1
    assert sorted(seen) == [32, 32, 32, 32, 35, 35]
    learners.set_num_threads(3)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("size", [32, 36], ids=["another thread's", "the caller's"])
def test_an_error_in_a_part_is_the_callers(three_threads, size):
    body = nn.Linear(2, 2)

    def trip(x):
        if x.shape[0] == size:
            raise ValueError(f"no picture of {x.shape[1]} pixels")
        return body(x)

    with pytest.raises(ValueError, match="no picture of 2 pixels"):
        learners.split(trip, torch.randn(100, 2), list(body.parameters()))


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell who waits")
def test_parts_of_other_threads_shrink_while_the_caller_waits():
    before, body, sizes = torch.get_num_threads(), nn.Linear(2, 2), []

    def noted(x):
        sizes.append(x.shape[0])
        return body(x)

    def update(wait_s):
        learners.split(
            noted, torch.randn(200, 2), list(body.parameters())
        ).sum().backward()
        time.sleep(wait_s)  # As for a batch.

    learners.set_num_threads(2, adapts=True)
    try:
        update(0.0)
        assert sorted(sizes) == [96, 104]
        for _ in range(10):
            update(0.2)  # In all 2 s: more than enough to give all of it up.
        assert sorted(sizes[-2:]) == [
            learners.LEAST_SAMPLES,
            200 - learners.LEAST_SAMPLES,
        ]
        learners.set_num_threads(2)  # As a run has it that is to repeat.
        for _ in range(3):
            update(0.2)
        assert sorted(sizes[-2:]) == [96, 104]
    finally:
        learners.set_num_threads(before)


def test_parts_of_other_threads_grow_to_even_ones_while_the_caller_never_waits():
    share = learners._Share(2, adapts=True)
    share.adapt(seconds=2.0, busy_s=0.0)
    assert share.sizes(100, 2) == [84, 16]
    share.adapt(seconds=10.0, busy_s=10.0)
    few = share.sizes(100, 2)[1]
    for _ in range(10):
        share.adapt(seconds=10.0, busy_s=10.0)
    assert share.sizes(100, 2) == [52, 48]
    assert 16 <= few < 48


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no own priority")
def test_who_gives_way_is_below_the_learner_however_low_that_is():
    code = "import os, learners; os.nice(15); learners.give_way(); print(os.nice(0))"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout == "19\n", shown.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no own priority")
@pytest.mark.parametrize(("num_threads", "nice"), [(1, 0), (2, 10)])
def test_a_learner_with_one_thread_needs_nobody_to_give_way(num_threads, nice):
    code = f"learners.set_num_threads({num_threads}); learners.give_way(only_to_split=True)"
    shown = subprocess.run(
        [sys.executable, "-c", f"import os, learners; {code}; print(os.nice(0))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert int(shown.stdout) - os.nice(0) == nice, shown.stderr


def learn_fixed(directory, shares, *args):
    """Reports and weights of learners that share fixed rollouts so."""
    directory.mkdir()
    count = len(shares.split(","))
    launcher = [*TORCHRUN, f"--nproc_per_node={count}"] if count > 1 else []
    module = ["-m", "tests.fixed_rollouts"]
    command = [*launcher, *module] if launcher else [sys.executable, *module]
    done = subprocess.run(
        [*command, str(directory), shares, *args],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        (
            json.loads((directory / f"report-{i}").read_text()),
            torch.load(directory / f"weights-{i}", weights_only=True),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("shares", "args"),
    [("2,6", ["--loss_reduction=sum"]), ("3,5", ["--net=deep"])],
)
def test_learners_with_shares_of_a_batch_learn_what_one_learns_of_all(
    tmp_path, shares, args
):
    # A large epsilon: with a small one Adam moves also those weights by a whole step
    # whose gradient is a rounding error. Small steps: with larger ones a unit that flips
    # on such an error makes a difference. They move a weight by up to 1e-3 in these 20
    # updates. bfloat16 rounds at the third digit.
    args = [*args, "--learning_rate=2e-4", "--epsilon=1e-2", "--no-amp"]
    ((whole, expected),) = learn_fixed(tmp_path / "one", "8", *args)
    (first, got), (second, other) = learn_fixed(tmp_path / "two", shares, *args)
    for name, weights in expected.items():
        assert torch.equal(got[name], other[name]), name
        torch.testing.assert_close(got[name], weights, rtol=0, atol=1e-6, msg=name)
    assert first == second
    assert first["step"] == whole["step"] == 20 * 5 * 8
    for mine, theirs in zip(first["stats"], whole["stats"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert first["episodes"] == [[1.0, 0], [1.0, 1], [1.0, 2]]


def start_two(start, *args, max_restarts=0, shared_store="1"):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared_store}
    launcher = [*TORCHRUN, "--nproc_per_node=2", f"--max-restarts={max_restarts}"]
    launcher += ["--monitor-interval=0.2", "--no-python"]
    return start(*SMALL, *args, agent="polybeast", wrapper=launcher, env=env)


def learner_pids(run):
    """Of the learners, by rank."""
    found = {}
    for pid in children(run.pid):
        try:
            words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = dict(w.partition(b"=")[::2] for w in words).get(b"RANK")
        if rank is not None:
            found[int(rank)] = pid
    return found


def test_steps_logs_and_checkpoint_are_those_of_all_learners(start, tmp_path):
    run = start_two(start, "--total_steps=1000")
    assert run.wait() == 0, run.text()
    assert "plan: 2 learners" in run.text()
    assert [path.name for path in (tmp_path / "runs").iterdir()].count("test") == 1
    rows = read_logs(run.path)
    # An update is 2 learners x 2 rollouts x 5 steps.
    assert int(rows[-1]["step"]) == 1000
    assert int(rows[-1]["updates"]) == 1000 / (2 * 2 * 5)
    saved = torch.load(run.path / "model.tar", weights_only=True)
    assert saved["step"] == 1000
    # Both play: one of them alone would have ended about half of these games.
    assert int(rows[-1]["episodes"]) == saved["num_episodes"] > 15


def test_a_signal_stops_all_learners_and_they_resume(start):
    run = start_two(start, "--total_steps=100000000")
    run.wait_for_step(200)
    pids = [run.pid, *learner_pids(run).values()]
    run.popen.send_signal(signal.SIGINT)
    assert run.wait(40) != 0
    assert not any(alive(pid) for pid in pids)
    step = torch.load(run.path / "model.tar", weights_only=True)["step"]
    assert step >= 200
    again = start_two(start, f"--total_steps={step + 400}")
    assert again.wait() == 0, again.text()
    assert f"from step {step} to" in again.text()


def test_learners_end_with_a_torchrun_that_is_killed(start):
    run = start_two(start, "--total_steps=100000000")
    run.wait_for_step(100)
    pids = learner_pids(run).values()
    run.popen.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), "learners live on", 40)


def kill_learners(run, times):
    """Kills one of the two so often; seconds until steps are made again, each time."""
    choose, taken = random.Random(0), []
    for i in range(times):
        step = run.wait_for_step(run.step() + 1000)
        pids = wait_for(lambda: len(p := learner_pids(run)) == 2 and p, run.text)
        before, when = run.text().count("from step"), time.monotonic()
        os.kill(pids[choose.randrange(2) if i > 1 else i], signal.SIGKILL)
        wait_for(lambda: run.text().count("from step") > before, run.text)  # noqa: B023
        run.wait_for_step(1)
        rows = len(read_logs(run.path))
        wait_for(lambda: len(read_logs(run.path)) > rows, run.text)  # noqa: B023
        taken.append(time.monotonic() - when)
        assert not any(alive(pid) for pid in pids.values())
        assert step > 0
    return taken


@pytest.mark.slow
def test_restarts_that_would_not_work_are_refused(start):
    run = start_two(start, max_restarts=1, shared_store="0")
    assert run.wait() != 0
    assert "type TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in run.text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_killed_learners(start):
    run = start_two(
        start, "--total_steps=100000000", "--checkpoint_s=0.5", max_restarts=9
    )
    taken = kill_learners(run, 5)
    print("seconds until it trains again:", [round(t, 1) for t in taken])
    assert max(taken) < 60


def test_several_learners_want_a_name_for_their_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "polybeast"],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--xpid NAME" in done.stderr
