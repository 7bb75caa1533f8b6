# SPDX-License-Identifier: Apache-2.0
"""PolyBeast with one part changed: benchmarks/policy_lag.py and benchmarks/centring.py."""

import csv
import subprocess
import sys

import numpy as np
import pytest
import torch

import polybeast
import vtrace
from benchmarks import centring, policy_lag
from tests.conftest import ROOT

SHORT = ["--env=MinAtar/Breakout-v1", "--num_servers=1", "--envs_per_server=4"]
SHORT += ["--unroll_length=5", "--batch_size=4", "--total_steps=2000", "--log_s=0.1"]


class Linear(torch.nn.Linear):
    def initial_state(self, batch_size):
        return ()


def test_actors_get_the_weights_of_some_updates_ago():
    class Lagging(policy_lag.OldWeights):
        lag = 3

    model = Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0)
    weights = Lagging(model, 0, "cpu")
    for version in range(1, 9):
        torch.nn.init.constant_(model.weight, version)
        weights.publish(model, version)
        with weights.use() as (used, of_version):
            assert of_version == max(version - 3, 0)
            assert used.weight.item() == of_version


def test_without_correction_targets_are_n_step_returns():
    generator = np.random.default_rng(0)
    T, B, A = 6, 3, 4
    rewards, values = generator.normal(size=(2, T, B)).astype(np.float32)
    bootstrap = generator.normal(size=B).astype(np.float32)
    discounts = np.where(generator.random((T, B)) < 0.2, 0.0, 0.9).astype(np.float32)
    expected = np.zeros((T, B), np.float32)
    after = bootstrap
    for t in reversed(range(T)):
        after = expected[t] = rewards[t] + discounts[t] * after
    logits = torch.randn(2, T, B, A)
    found = policy_lag.on_policy(
        behavior_policy_logits=logits[0],
        target_policy_logits=logits[1],
        actions=torch.zeros(T, B, dtype=torch.int64),
        discounts=torch.from_numpy(discounts),
        rewards=torch.from_numpy(rewards),
        values=torch.from_numpy(values),
        bootstrap_value=torch.from_numpy(bootstrap),
        lambda_=1.0,
        mask=torch.ones(T, B, dtype=torch.bool),
    )
    np.testing.assert_allclose(found.vs, expected, rtol=1e-5)
    np.testing.assert_allclose(found.pg_advantages, expected - values, rtol=1e-4)


def test_agents_are_as_before_when_a_changed_one_has_ended(monkeypatch, tmp_path):
    """Also where it fails; here as its flags are wrong."""
    before = (polybeast.rollouts.Weights, vtrace.from_logits)
    flags = ["--mode=test", f"--savedir={tmp_path}", "--xpid=none"]
    parse = policy_lag.parser.parse_args
    assert policy_lag.main(parse([*flags, "--lag=3", "--no-correction"])) == 1
    assert (polybeast.rollouts.Weights, vtrace.from_logits) == before
    assert centring.main(centring.parser.parse_args([*flags, "--no-centring"])) == 1
    assert polybeast.ImageBody.NUM_AVERAGED == 100
    assert polybeast.ImageBody.DIVISOR == 32
    assert not hasattr(polybeast.parser.parse_args([]), "lag")


def run(tmp_path, module, xpid, *args):
    """The run's directory; it trained, and PolyBeast itself can test it."""
    where = [f"--savedir={tmp_path}", f"--xpid={xpid}"]
    test = ["--mode=test", "--num_test_episodes=2"]
    for name, words in ((module, [*SHORT, *args]), ("polybeast", test)):
        done = subprocess.run(
            [sys.executable, "-m", name, *words, *where],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return tmp_path / xpid


@pytest.mark.slow
def test_a_run_with_old_weights_says_how_old_they_are(tmp_path):
    path = run(tmp_path, "benchmarks.policy_lag", "old", "--lag=30", "--no-correction")
    with (path / "logs.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert 30 <= float(last["policy_lag"]) < 60
    assert "python -m benchmarks.policy_lag" in (path / "meta.json").read_text()


@pytest.mark.slow
def test_without_centring_the_mean_picture_stays_black(tmp_path):
    for flag, is_black in (("--centring", False), ("--no-centring", True)):
        path = run(tmp_path, "benchmarks.centring", flag.strip("-"), flag)
        saved = torch.load(path / "model.tar", weights_only=True)["model_state_dict"]
        assert (saved["bodies.0.background"] == 0).all() == is_black
