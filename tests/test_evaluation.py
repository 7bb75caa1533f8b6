# SPDX-License-Identifier: Apache-2.0
"""Tests of trained agents: by hand, and while they train."""

import csv
import importlib
import json
import os
import pathlib
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch

import evaluation
import learners
from tests.conftest import alive, children, wait_for

AGENTS = ["monobeast"]
if not os.environ.get("CHIMERA_NO_LIBBEAST"):
    AGENTS += ["polybeast"]
CARTPOLE = {
    "monobeast": ["--env=CartPole-v1", "--num_actors=1", "--envs_per_actor=4"],
    "polybeast": ["--env=CartPole-v1", "--num_servers=1", "--envs_per_server=4"],
}


def read_evals(path):
    if not (path / "evals.csv").exists():
        return []
    with (path / "evals.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def find_testers(pid):
    """Children of pid that test."""
    return [child for child in children(pid) if b"--mode=test" in command_line(child)]


def command_line(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_interval_holds_the_mean_and_shrinks_with_more_games():
    random = np.random.default_rng(0)
    few, many = random.normal(5, 2, 10).tolist(), random.normal(5, 2, 1000).tolist()
    widths = []
    for values in (few, many):
        low, high = evaluation.mean_interval(values)
        assert low < np.mean(values) < high
        widths.append(high - low)
    # Of a normal distribution, 2 * 1.96 * 2 / sqrt(1000).
    assert widths[1] == pytest.approx(0.248, rel=0.1)
    assert widths[0] > 4 * widths[1]
    assert evaluation.mean_interval([7.0, 7.0, 7.0]) == (7.0, 7.0)
    assert evaluation.mean_interval([7.0]) is None


@pytest.mark.parametrize("agent", AGENTS)
def test_a_test_prints_a_table_and_writes_eval_json(start, agent):
    run = start(*CARTPOLE[agent], "--total_steps=2000", agent=agent)
    assert run.wait() == 0, run.text()
    args = ["--mode=test", "--num_test_episodes=5", "--seed=3", "--capture_video"]
    test = start(*args, agent=agent)
    assert test.wait() == 0, test.text()
    report = json.loads((run.path / "eval.json").read_text())
    returns = report["returns"]
    assert len(returns) == report["episodes"] == 5
    assert report["mean"] == pytest.approx(np.mean(returns))
    assert (report["min"], report["max"]) == (min(returns), max(returns))
    low, high = report["interval_95"]
    assert report["min"] <= low <= report["mean"] <= high <= report["max"]
    assert (report["seed"], report["greedy"]) == (3, False)
    assert report["steps_trained"] >= 2000
    *_, names, values, videos = test.text().strip().splitlines()
    columns = "episodes mean std min max interval actions seed steps trained"
    assert all(name in names for name in columns.split())
    assert f"{report['mean']:.2f}" in values
    assert f"{low:.2f} to {high:.2f}" in values
    assert len(list(pathlib.Path(videos.removeprefix("videos in ")).iterdir())) == 5
    greedy = start(*args[:3], "--greedy", agent=agent)
    assert greedy.wait() == 0, greedy.text()
    assert json.loads((run.path / "eval.json").read_text())["greedy"] is True


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("is_on", [True, False])
def test_a_test_takes_the_models_flags_from_the_run(tmp_path, agent, is_on):
    module = importlib.import_module(agent)
    where = [f"--savedir={tmp_path}", "--xpid=run"]
    names = ("use_lstm", "clip_rewards", "amp")
    switches = [f"--{'' if is_on else 'no-'}{name}" for name in names]
    args = [*CARTPOLE[agent], "--total_steps=160", *where, *switches]
    assert module.main(module.parser.parse_args(args)) == 0

    def taken(*given):
        flags = module.parser.parse_args(["--mode=test", *where, *given])
        module.check_flags(flags)
        evaluation.Test(flags, module.OF_THE_RUN)
        return [getattr(flags, name) for name in names]

    assert taken() == [is_on, is_on, is_on and learners.has_bfloat16()]
    assert taken("--no-amp", "--clip_rewards") == [is_on, True, False]
    # A checkpoint of a version that had none of these flags.
    saved = torch.load(tmp_path / "run" / "model.tar", weights_only=True)
    for name in names:
        del saved["flags"][name]
    torch.save(saved, tmp_path / "run" / "model.tar")
    assert taken() == [False, True, None]


@pytest.mark.parametrize("agent", AGENTS)
def test_the_lstm_sees_rewards_as_the_loss_does(agent):
    module = importlib.import_module(agent)
    space = gym.spaces.Box(-1, 1, (3,), np.float32)
    torch.manual_seed(0)
    clipped = module.Net(space, 2, "auto", use_lstm=True)
    free = module.Net(space, 2, "auto", use_lstm=True, clip_rewards=False)
    free.load_state_dict(clipped.state_dict())
    row = {"observation": torch.zeros(1, 2, 3), "reward": torch.tensor([[1.0, 50.0]])}
    row |= {"first": torch.ones(1, 2, dtype=torch.bool)}
    row |= {"last_action": torch.zeros(1, 2, dtype=torch.int64)}
    for model, is_same in ((clipped, True), (free, False)):
        outputs, _ = model(row, model.initial_state(2))
        one, fifty = outputs["policy_logits"][0]
        assert torch.equal(one, fifty) == is_same


@pytest.mark.parametrize("agent", AGENTS)
def test_a_run_is_tested_while_it_trains(start, agent):
    args = ["--total_steps=100000000", "--eval_every=500", "--num_test_episodes=3"]
    run = start(*CARTPOLE[agent], *args, agent=agent)
    wait_for(lambda: run.step() and len(read_evals(run.path)) >= 2, run.text, 150)
    rows = read_evals(run.path)
    assert int(rows[0]["step"]) >= 500
    assert int(rows[1]["step"]) >= int(rows[0]["step"]) + 500
    assert all(row["episodes"] == "3" for row in rows)
    assert float(rows[0]["min"]) <= float(rows[0]["mean"]) <= float(rows[0]["max"])
    assert "test of step" in run.text()
    # It trains on meanwhile: most of the log's rows fall into tests.
    assert run.step() > int(rows[1]["step"])

    (pid,) = wait_for(lambda: find_testers(run.pid), run.text)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait(30) == 128 + signal.SIGTERM, run.text()
    assert not alive(pid)


def test_a_test_ends_with_a_run_that_is_killed(start):
    args = ["--total_steps=100000000", "--eval_every=200", "--num_test_episodes=3"]
    run = start(*CARTPOLE["monobeast"], *args)
    (pid,) = wait_for(lambda: find_testers(run.pid), run.text)
    run.popen.kill()
    wait_for(lambda: not alive(pid), "the test lives on", 5)


def test_a_test_that_fails_does_not_end_the_training(start):
    args = ["--total_steps=100000000", "--eval_every=500", "--num_test_episodes=3"]
    run = start(*CARTPOLE["monobeast"], *args)
    run.wait_for_step(200)
    (run.path / "eval_training.json").mkdir()  # Cannot be replaced by a file.
    wait_for(lambda: "failed" in run.text(), run.text, 100)
    step = run.step()
    run.wait_for_step(step + 1000)
    assert "cannot write" in run.text()


@pytest.mark.parametrize(
    "agent", ["monobeast", pytest.param("polybeast", marks=pytest.mark.slow)]
)
def test_a_test_may_write_much_to_stderr(start, agent):
    args = [*CARTPOLE[agent][1:], "--env=tests.envs.loud:Loud-v0", "--eval_every=500"]
    args += ["--total_steps=100000000", "--num_test_episodes=2"]
    run = start(*args, agent=agent, env={"LOUD": "works"})
    wait_for(lambda: run.step() and len(read_evals(run.path)) >= 2, run.text, 100)
    run.popen.send_signal(signal.SIGTERM)
    assert run.wait(30) == 128 + signal.SIGTERM, run.text()


@pytest.mark.slow
def test_a_loud_test_that_fails_is_quoted_and_the_run_ends(start):
    args = [*CARTPOLE["monobeast"][1:], "--env=tests.envs.loud:Loud-v0"]
    args += ["--eval_every=200", "--total_steps=2000", "--num_test_episodes=2"]
    run = start(*args, env={"LOUD": "fails"})
    assert run.wait(60) == 0, run.text()
    assert "the test of step" in run.text()
    assert "RuntimeError: the simulator lost its licence" in run.text()
    assert read_evals(run.path) == []


@pytest.mark.slow
def test_a_test_by_hand_is_not_taken_for_one_of_the_training(start):
    args = ["--total_steps=100000000", "--eval_every=500", "--num_test_episodes=3"]
    run = start(*CARTPOLE["monobeast"], *args)
    wait_for((run.path / "model.tar").exists, run.text)
    # A test by hand is over at any moment, that is, again and again.
    report = run.path / "eval.json"
    by_hand = {"steps_trained": -1, "episodes": -1, "mean": -1, "std": 0, "min": -1}
    by_hand = json.dumps(by_hand | {"max": -1})

    def is_tested_twice():
        report.write_text(by_hand)
        return run.step() and len(read_evals(run.path)) >= 2

    wait_for(is_tested_twice, run.text, 100)
    assert {row["episodes"] for row in read_evals(run.path)} == {"3"}
    assert report.read_text() == by_hand  # Nor is it overwritten.


@pytest.mark.slow
def test_damaged_evals_are_kept_aside_and_go_on(start):
    args = [*CARTPOLE["monobeast"], "--eval_every=200", "--num_test_episodes=2"]
    run = start(*args, "--total_steps=600")
    assert run.wait() == 0, run.text()
    before = read_evals(run.path)
    assert before
    with (run.path / "evals.csv").open("a") as file:
        file.write('500,"2,3')
    again = start(*args, "--total_steps=1200")
    assert again.wait() == 0, again.text()
    assert "evals.csv is damaged (1 of" in again.text()
    after = read_evals(run.path)
    assert after[: len(before)] == before
    assert all(row["episodes"] == "2" for row in after)
    assert int(after[-1]["step"]) > 600
    (kept,) = run.path.glob("evals.csv.damaged-*")
    assert kept.read_text().endswith('500,"2,3')
