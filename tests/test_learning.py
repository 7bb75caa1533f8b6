# SPDX-License-Identifier: Apache-2.0
"""Does it learn? Real runs to a stated return; minutes each, so marked slow."""

import numpy as np
import pytest

import monobeast


def trained(tmp_path, *args):
    """Returns of 20 test episodes after training with these flags."""
    common = [f"--savedir={tmp_path}", "--xpid=test"]
    train = monobeast.parser.parse_args([*common, *args])
    assert monobeast.main(train) == 0
    test = monobeast.parser.parse_args(
        [*common, "--mode=test", "--num_test_episodes=20"]
    )
    monobeast.check_flags(test)
    return monobeast.test(test)


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_cartpole_is_solved_within_five_minutes(tmp_path):
    args = ["--total_steps=600000", "--learning_rate=2e-3", "--baseline_cost=0.1"]
    returns = trained(tmp_path, "--env=CartPole-v1", *args)
    assert np.mean(returns) >= 475


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_minatar_breakout_is_learned_within_five_minutes(tmp_path):
    args = ["--total_steps=2000000", "--learning_rate=4e-3", "--batch_size=16"]
    args += ["--entropy_cost=0.01"]
    returns = trained(tmp_path, "--env=MinAtar/Breakout-v1", *args)
    assert np.mean(returns) >= 8
