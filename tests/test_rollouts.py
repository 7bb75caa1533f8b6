# SPDX-License-Identifier: Apache-2.0
import functools
import multiprocessing
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import monobeast
import rollouts
from tests.conftest import alive, make_flags, wait_for

COUNTING = "tests.envs:Counting-v0"
LIMIT = "tests.envs:CountingLimit-v0"


def open_source(flags):
    """The learner's source of batches with weights that do not change."""
    torch.manual_seed(0)
    env = monobeast.open_env(flags, 1)
    model = monobeast.create_model(flags, env)
    env.close()
    weights = rollouts.SharedWeights(model)
    return model, monobeast.start_actors(flags, weights, step=0)


def collect(flags, num_batches):
    """num_batches batches, from processes or inline."""
    model, source = open_source(flags)
    with source:
        batches = [wait_for(source.next_batch, "no batch") for _ in range(num_batches)]
    return model, batches


@pytest.mark.parametrize("env_id", [COUNTING, LIMIT])
@pytest.mark.parametrize("num_actors", [0, 2])
def test_every_reward_is_trained_on_exactly_once(env_id, num_actors):
    flags = make_flags(
        env=env_id,
        num_actors=num_actors,
        envs_per_actor=1,
        batch_size=1,
        unroll_length=4,
    )
    _, batches = collect(flags, num_batches=20)
    trained = []
    for batch in batches:
        valid = ~batch.rows["first"][1:]
        trained += batch.rows["reward"][1:][valid].tolist()
    # Each environment counts 1, 2, 3, ...; batches of two actors come interleaved.
    seen = sorted(trained)
    num_envs = max(num_actors, 1)
    if num_envs == 1:
        assert trained == list(range(1, len(trained) + 1))
    else:
        counts = {reward: seen.count(reward) for reward in set(seen)}
        assert set(counts.values()) <= {1, 2}
        both = [reward for reward, count in counts.items() if count == 2]
        assert sorted(both) == list(range(1, len(both) + 1))
        assert sorted(counts) == list(range(1, len(counts) + 1))
    # And nothing else is in the transitions that are masked out.
    for batch in batches:
        assert (batch.rows["reward"][batch.rows["first"]] == 0).all()


def test_row_zero_repeats_the_last_row_of_the_rollout_before():
    flags = make_flags(env=COUNTING, num_actors=0, envs_per_actor=1, batch_size=1)
    _, (before, after) = collect(flags, num_batches=2)
    for key, value in before.rows.items():
        torch.testing.assert_close(value[-1], after.rows[key][0], msg=key)


@pytest.mark.parametrize(
    ("env_id", "how", "length"), [(COUNTING, "terminated", 7), (LIMIT, "truncated", 5)]
)
def test_rows_mark_ends_and_firsts(env_id, how, length):
    flags = make_flags(
        env=env_id, num_actors=0, envs_per_actor=2, batch_size=2, unroll_length=30
    )
    _, (batch,) = collect(flags, num_batches=1)
    rows = batch.rows
    other = "truncated" if how == "terminated" else "terminated"
    assert not rows[other].any()
    position = torch.arange(31)[:, None].expand(31, 2) % (length + 1)
    assert (rows[how] == (position == length)).all()
    assert (rows["first"] == (position == 0)).all()
    assert (rows["observation"][..., 1] == position).all()  # The ending row's too.
    assert (rows["episode_step"] == position).all()
    assert (rows["last_action"][1:] == rows["action"][:-1]).all()
    ended = position == length
    assert (rows["episode_return"][position == 0] == 0).all()
    returns = rows["episode_return"][ended].view(-1, 2)
    sums = [
        sum(range(e * length + 1, (e + 1) * length + 1)) for e in range(len(returns))
    ]
    assert returns.tolist() == [[total, total] for total in sums]
    # Whole episodes are reported once, complete: no phantom one at step 0.
    assert batch.episodes == [(total, length) for total in sums for _ in range(2)]


def test_life_loss_episodes_report_whole_games():
    flags = make_flags(
        "--episode_life", env="BreakoutNoFrameskip-v4", num_actors=0, envs_per_actor=1,
        batch_size=1, unroll_length=400, num_buffers=2,
    )  # fmt: skip
    _, (batch,) = collect(flags, num_batches=1)
    rows = batch.rows
    games = len(batch.episodes)
    assert games >= 1
    assert int(rows["terminated"].sum()) >= 5 * games
    assert (rows["episode_step"][rows["first"]] > 0).any()  # A life, not a game.
    assert batch.episodes[0][0] == rows["reward"].cumsum(0)[batch.episodes[0][1]].max()


class NonZeroState(monobeast.Net):
    """An LSTM whose episodes begin in a state that is not zero."""

    def initial_state(self, batch_size):
        return tuple(x + 0.5 for x in super().initial_state(batch_size))


@pytest.mark.parametrize("net", [monobeast.Net, NonZeroState])
def test_recurrent_state_equals_a_straight_run_over_the_episodes(net, monkeypatch):
    flags = make_flags(
        "--use_lstm", env=COUNTING, num_actors=0, envs_per_actor=2, batch_size=2,
        unroll_length=5,
    )  # fmt: skip
    monkeypatch.setattr(monobeast, "Net", net)
    model, batches = collect(flags, num_batches=6)
    rows = {  # All steps in a row, without the repeated ones.
        key: torch.cat(
            [b.rows[key][1:] if i else b.rows[key] for i, b in enumerate(batches)]
        )
        for key in batches[0].rows
    }
    with torch.no_grad():
        state = None
        for t in range(len(rows["first"])):
            row = {key: value[t : t + 1] for key, value in rows.items()}
            if row["first"].any():
                assert row["first"].all()
                state = model.initial_state(2)
            # `first` is hidden here: the straight run resets the state by hand.
            row["first"] = torch.zeros(1, 2, dtype=torch.bool)
            outputs, state = model(row, state)
            torch.testing.assert_close(
                outputs["policy_logits"][0], rows["policy_logits"][t]
            )
        for (
            batch
        ) in batches:  # The learner's view: from the stored state over T + 1 rows.
            outputs, _ = model(batch.rows, batch.core_state)
            torch.testing.assert_close(
                outputs["policy_logits"], batch.rows["policy_logits"]
            )
            torch.testing.assert_close(outputs["baseline"], batch.rows["baseline"])


class Linear(nn.Module):
    """Policy uniform, value a linear function of the observation."""

    weights = torch.tensor([0.3, -0.7])

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, core_state=()):
        T, B = inputs["first"].shape
        baseline = inputs["observation"] @ self.weights
        return {"policy_logits": torch.zeros(T, B, 2), "baseline": baseline}, ()


@pytest.mark.parametrize(("env_id", "length"), [(COUNTING, 7), (LIMIT, 5)])
def test_a_time_limit_bootstraps_from_the_real_last_observation(
    env_id, length, monkeypatch
):
    """The baseline loss equals one computed from what the environment is known to do."""
    monkeypatch.setattr(monobeast, "create_model", lambda flags, env: Linear())
    flags = make_flags(
        "--no-clip_rewards", env=env_id, num_actors=0, envs_per_actor=1, batch_size=1,
        unroll_length=20,
    )  # fmt: skip
    model, (batch,) = collect(flags, num_batches=1)
    loss = monobeast.compute_losses(flags, model, *batch[:2])["baseline_loss"]

    def value(episode, step):
        return 0.3 * episode - 0.7 * step

    errors = []
    for start in range(0, 20, length + 1):
        episode = start // (length + 1)
        stop = min(start + length, 20)  # Row where the episode or the rollout ends.
        target = value(episode, stop - start)
        if env_id == COUNTING and stop == start + length:
            target = 0.0
        for row in reversed(range(start, stop)):
            reward = episode * length + row - start + 1
            target = reward + flags.discounting * target
            errors.append(0.5 * (target - value(episode, row - start)) ** 2)
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-5)


def test_batches_carry_the_policy_version():
    flags = make_flags(env=COUNTING, num_actors=0, envs_per_actor=1, batch_size=1)
    env = monobeast.open_env(flags, 1)
    model = monobeast.create_model(flags, env)
    env.close()
    weights = rollouts.SharedWeights(model)
    with monobeast.start_actors(flags, weights, step=0) as source:
        assert (source.next_batch().rows["policy_version"] == 0).all()
        weights.publish(model, 1)
        versions = source.next_batch().rows["policy_version"].flatten()
    assert versions[0] == 0  # The repeated row was decided with the old weights.
    assert (versions[1:] == 1).all()


class Filled(nn.Module):
    """Large enough that a copy takes a while; all weights hold one number."""

    def __init__(self, number):
        super().__init__()
        self.x = nn.Parameter(torch.full((500_000,), float(number)))
        self.register_buffer("y", torch.full((500_000,), float(number)))


def pull_often(weights, num_pulls, results):
    model, version, torn = Filled(-1), -1, 0
    for _ in range(num_pulls):
        version = weights.pull(model, version)
        values = torch.cat([model.x.detach(), model.y])
        torn += not bool((values == version).all())
    results.send((torn, version))


def test_actors_never_see_half_written_weights():
    context = multiprocessing.get_context("spawn")
    weights = rollouts.SharedWeights(Filled(0))
    readers = []
    for _ in range(2):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=pull_often, args=(weights, 100, theirs))
        process.start()
        readers.append((process, ours))
    version = 0
    while not all(ours.poll() for _, ours in readers):
        assert all(process.exitcode in (None, 0) for process, _ in readers)
        version += 1
        weights.publish(Filled(version), version)
    for process, ours in readers:
        torn, seen = ours.recv()
        process.join(timeout=10)
        assert process.exitcode == 0
        assert torn == 0
        assert seen > 0


def test_closing_ends_processes_and_threads():
    flags = make_flags(env=COUNTING, num_actors=2, envs_per_actor=2, batch_size=2)
    before = set(threading.enumerate())
    _, source = open_source(flags)
    with source:
        wait_for(source.next_batch, "no batch")
        pids = source.pids()
        assert len(pids) == 2
    assert set(threading.enumerate()) == before
    assert not [pid for pid in pids if alive(pid)]


TROUBLED = {"env": "tests.envs:Troubled-v0", "num_actors": 1, "envs_per_actor": 1}


def test_restarts_are_bounded(monkeypatch):
    monkeypatch.setenv("TROUBLE", "raise")
    flags = make_flags(**TROUBLED, batch_size=1, unroll_length=5, max_actor_restarts=1)
    with pytest.raises(monobeast.UserError, match="--max_actor_restarts=1 ") as caught:
        collect(flags, num_batches=100)
    assert "ZeroDivisionError: the emulator fell over" in str(caught.value)


def test_an_actor_that_hangs_is_killed_and_replaced(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TROUBLE", f"hang-once {tmp_path / 'hung'}")
    flags = make_flags(**TROUBLED, batch_size=1, unroll_length=5, actor_timeout_s=7)
    collect(flags, num_batches=20)
    assert (tmp_path / "hung").exists()
    assert "silent for 7 s" in caplog.text


def test_buffers_too_few_for_a_batch_are_refused():
    with pytest.raises(ValueError, match="--num_buffers="):
        make_flags(num_buffers=8, batch_size=8, envs_per_actor=4)


def test_the_least_number_of_buffers_does_not_deadlock():
    flags = make_flags(
        env=COUNTING, num_actors=2, envs_per_actor=3, batch_size=4, num_buffers=6
    )
    _, batches = collect(flags, num_batches=20)
    assert len(batches) == 20


def test_nested_observations_arrive_whole():
    flags = make_flags(env="tests.envs:Nested-v0", num_actors=0, batch_size=2)
    model, (batch,) = collect(flags, num_batches=1)
    image = batch.rows["observation"]["image"]
    number, vector = batch.rows["observation"]["parts"]
    assert image.shape == (21, 2, 3, 5, 5)
    assert image.dtype == torch.uint8
    assert number.shape == (21, 2)
    assert vector.shape == (21, 2, 2)
    outputs, _ = model(batch.rows, ())
    assert outputs["policy_logits"].shape == (21, 2, 3)


def test_a_vector_environment_that_resets_otherwise_is_refused(monkeypatch):
    def create_env(flags, num_envs, render_mode=None):
        mode = gym.vector.AutoresetMode.SAME_STEP
        make = functools.partial(gym.make, "CartPole-v1")
        return gym.vector.SyncVectorEnv([make], autoreset_mode=mode)

    monkeypatch.setattr(monobeast, "create_env", create_env)
    with pytest.raises(monobeast.UserError, match="NEXT_STEP"):
        monobeast.open_env(make_flags(), 1)
