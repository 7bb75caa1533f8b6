# SPDX-License-Identifier: Apache-2.0
"""Does it still learn? Real runs to a stated return: `make learn-test`.

All of them together take less than 10 minutes on 2 cores, each has its own deadline.
"""

import importlib
import os

import numpy as np
import pytest

pytestmark = pytest.mark.learning
AGENTS = ["monobeast", "polybeast"]
if os.environ.get("CHIMERA_NO_LIBBEAST"):
    AGENTS.remove("polybeast")


def trained(tmp_path, name, *args):
    """Mean return of 100 test episodes after training with these flags."""
    agent = importlib.import_module(name)
    common = [f"--savedir={tmp_path}", "--xpid=test"]
    assert agent.main(agent.parser.parse_args([*common, *args])) == 0
    test = agent.parser.parse_args([*common, "--mode=test", "--num_test_episodes=100"])
    agent.check_flags(test)
    return np.mean(agent.test(test))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("agent", AGENTS)
def test_catch_is_solved_within_a_minute(tmp_path, agent):
    args = ["--total_steps=100000", "--learning_rate=2e-3"]
    assert trained(tmp_path, agent, "--env=tests.envs.catch:Catch-v0", *args) >= 0.9


@pytest.mark.timeout(120)
@pytest.mark.parametrize("agent", AGENTS)
def test_cartpole_is_solved_within_two_minutes(tmp_path, agent):
    # Sampled games of two runs came to 498 with these flags, of four with half the steps
    # to 450 to 497, of four with the default entropy cost and half the steps to 477 to 487.
    args = ["--total_steps=1200000", "--learning_rate=2e-3", "--baseline_cost=0.1"]
    args += ["--entropy_cost=0.003"]
    assert trained(tmp_path, agent, "--env=CartPole-v1", *args) >= 475


@pytest.mark.timeout(240)
def test_minatar_breakout_is_learned_within_four_minutes(tmp_path):
    args = ["--total_steps=2000000", "--learning_rate=4e-3", "--batch_size=16"]
    args += ["--entropy_cost=0.01"]
    assert trained(tmp_path, "monobeast", "--env=MinAtar/Breakout-v1", *args) >= 8
