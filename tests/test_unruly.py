# SPDX-License-Identifier: Apache-2.0
"""Environments that misbehave, trained by both agents."""

import dataclasses
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import atari_wrappers
import monobeast
import polybeast
import rollouts
from tests.conftest import read_logs
from tests.envs import Counting
from tests.envs.served import Echo
from tests.serving import Acting, serve

SMALL = ("--batch_size=2", "--unroll_length=10", "--log_s=0.01", "--xpid=test")
AGENTS: dict[Any, tuple[str, ...]] = {
    monobeast: ("--num_actors=0", "--envs_per_actor=2"),
    polybeast: ("--num_servers=1", "--envs_per_server=2"),
}


@dataclasses.dataclass
class Outcome:
    code: int
    text: str  # What the agent and its processes said.
    path: pathlib.Path  # Of the run.

    def weights(self):
        return torch.load(self.path / "model.tar", weights_only=True)


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.__name__)
def run(request, tmp_path, capfd, caplog):
    """Runs either agent in this process, with actors or servers in their own."""

    def begin(name, *args, actor_processes=False):
        agent = request.param
        if actor_processes and agent is monobeast:
            args += ("--num_actors=1",)
        argv = [f"--env=tests.envs.unruly:{name}-v0"] if name else ["--mode=test"]
        argv += [*SMALL, *AGENTS[agent], "--total_steps=600", f"--savedir={tmp_path}"]
        code = agent.main(agent.parser.parse_args([*argv, *args]))
        text = caplog.text + "".join(capfd.readouterr())
        caplog.clear()
        return Outcome(code, text, tmp_path / "test")

    return begin


def test_an_environment_may_print_without_end(run):
    done = run("Printing")
    assert done.code == 0, done.text[-3000:]
    assert done.text.count("x" * 4096) >= 500
    assert done.text.count("y" * 4096) >= 500


FAULTS = {
    "nan_reward": "gave the reward nan",
    "inf_observation": "is not finite",
    "none_reward": "reward n",  # nan of None in a vector of numpy's.
    "missing_key": "more",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_at_fault_is_named_and_the_weights_are_saved(
    run, fault, monkeypatch
):
    monkeypatch.setenv("FAULT", fault)
    # Rollouts longer than it lasts: no actor ever delivers one. What an environment
    # raises is told by an actor in a process; in ours it is a traceback.
    raises = fault == "missing_key"
    done = run("Faulty", "--unroll_length=40", actor_processes=raises)
    assert done.code == 1, done.text[-3000:]
    assert FAULTS[fault] in done.text.lower()
    assert "learning_rate" not in done.text
    if fault in ("nan_reward", "inf_observation"):
        assert "environment 0 of" in done.text
        assert "step 2 of its episode" in done.text  # The 30th of episodes of 7.
    weights = done.weights()["model_state_dict"]
    assert all(x.isfinite().all() for x in weights.values())


def test_one_reward_that_is_not_a_number_costs_one_rollout(run, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", f"nan_reward {tmp_path / 'given'}")
    done = run("Faulty", actor_processes=True)
    assert done.code == 0, done.text[-3000:]
    assert "gave the reward nan" in done.text
    assert done.weights()["step"] == 600


def test_a_game_over_of_the_environment_is_not_taken_for_ours(run):
    done = run("OwnGameOver")
    assert done.code == 0, done.text[-3000:]
    last = read_logs(done.path)[-1]
    assert int(last["episodes"]) >= 60
    assert float(last["mean_episode_steps"]) == 7


class SaysGameOver(Counting):
    """Its episodes are parts of games; it says so only where a game goes on."""

    def step(self, action):
        *results, info = super().step(action)
        if results[2] and self.episode % 3:
            info[atari_wrappers.GAME_OVER] = False
        return *results, info


def test_what_an_environment_says_counts_for_it_alone():
    # Of two environments one ends at a time, so the other one's entry is a filler.
    env = gym.vector.SyncVectorEnv(
        [lambda: SaysGameOver(length=4), lambda: SaysGameOver(length=5)],
        autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
    )
    rows = rollouts.RowMaker(env, seed=1)
    rows.initial()
    for _ in range(60):
        rows.step(np.zeros(2, np.int64))
    # The first episode is a game of its own, then three make one.
    assert [n for _, n in rows.finished] == [4, 5, 12, 15, 12, 15, 12, 15]


def test_an_environment_that_cannot_be_closed_is_trained_and_tested(run):
    done = run("CloseRaises")
    assert done.code == 0, done.text[-3000:]
    assert "the window was gone already" in done.text
    tested = run(None)
    assert tested.code == 0, tested.text
    assert "steps trained" in tested.text


@pytest.mark.parametrize("name", ["IntegerKeys", "MixedKeys", "TinyImages"])
def test_odd_observations_are_trained_and_tested(run, name):
    done = run(name)
    assert done.code == 0, done.text[-3000:]
    tested = run(None)
    assert tested.code == 0, tested.text


@pytest.mark.parametrize("name", ["OneOf", "OnlyText", "Text"])
def test_what_has_no_arrays_is_refused_in_a_sentence(run, name):
    done = run(name)
    assert done.code == 1, done.text
    (error,) = [line for line in done.text.splitlines() if line.startswith("ERROR")]
    assert name[-4:] in error  # The space.
    assert "Traceback" not in done.text


def test_a_deprecated_id_is_refused_in_a_sentence(run):
    done = run("Printing", "--env=LunarLander-v2")
    assert done.code == 1, done.text
    assert "deprecated" in done.text
    assert "LunarLander-v3" in done.text
    assert "Traceback" not in done.text


def test_images_of_many_values_are_scaled_as_bytes_are():
    def body(high, dtype):
        space = gym.spaces.Box(0, high, (1, 40, 40), dtype)
        return monobeast.create_body(space, "auto").eval()

    assert body(255, np.uint8).scale.item() == 1 / 32
    for high, dtype in ((60_000, np.uint16), (4095, np.int32)):
        assert body(high, dtype).scale.item() == pytest.approx(255 / 32 / high)
    # No range, or a small one; what is a float was scaled by its environment.
    for high, dtype in ((2**63 - 1, np.int64), (7, np.int16), (255, np.float32)):
        assert body(high, dtype).scale.item() == 1


def test_both_agents_scale_images_alike(run):
    done = run("DeepImages", "--total_steps=100")
    assert done.code == 0, done.text[-3000:]
    scale = done.weights()["model_state_dict"]["bodies.0.scale"]
    assert scale.item() == pytest.approx(255 / 32 / 60_000)


def test_actions_of_integer_keys_come_back_with_them():
    space = gym.spaces.Dict(
        {10: gym.spaces.Discrete(3), 9: gym.spaces.Box(-1, 1, (2,))}
    )

    def act(rows, state):
        actions = {
            "10": np.full_like(rows["last_action"]["10"], 2),
            "9": np.full_like(rows["last_action"]["9"], 0.5),
        }
        return {"action": actions}, state

    with serve(lambda: Echo(space)) as server, Acting(server.address(), act) as acting:
        ((rows, _),) = acting.rollouts(1)  # Echo takes samples of its space only.
    assert (rows["observation"]["10"][1:] == 2).all()
    assert (rows["observation"]["9"][1:] == 0.5).all()
